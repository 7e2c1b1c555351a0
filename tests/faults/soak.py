"""The long form of the fault tests, in pieces of minutes that can be run on any day.

    python -m tests.faults.soak            # the next pieces, until all are done
    python -m tests.faults.soak --for 8    # no new piece after 8 minutes
    python -m tests.faults.soak --again    # also pieces that were run with other code
    python -m tests.faults.soak --report   # write benchmarks/results/soak.md

Each piece appends a line to ``benchmarks/results/soak.jsonl``: what was injected, how
many runs were lost, how many ranks diverged, and with which code: the commit, and git's
digests of ``src`` and ``lab/src``. The page names the commits of each row, so that runs
of several days add up and nobody takes them for one. A piece that is run again replaces
what was there; one of code that was not committed does not count.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from tests.faults.agent import preload
from tests.faults.cells import CELLS, SHARDED
from tests.faults.launch import ROOT
from tests.faults.left import SLOPE
from tests.faults.parts import PARTS, Result

RESULTS = Path("benchmarks/results/soak.jsonl")
REPORT = RESULTS.with_suffix(".md")
WORDS = {
    "numbers": "NaN, Inf in batch, activation, gradient, statistic, inverse; 2 ranks, "
    "SPNGD, KFAC under DDP, the same in float16 with GradScaler",
    "damaged": "checkpoint files changed, cut or lost",
    "full": "saves on a full disk",
    "cells": "ranks that raise, die, stand still, have other settings, weights or "
    "gradients, NaN or no examples; every strategy, rule and optimizer, DDP and own "
    "gradients; 2 and 3 ranks",
    "sharded": "the same under fully_shard: KFAC, SPNGD, Polar; 2 and 3 ranks",
    "killed": "kill -9 at 8 points of a step and a save, errors, SIGTERM; 2 ranks",
    "hung": "a rank that stands still",
    "fewer": "kill -9 and fewer ranks after it: 4, 2, 1",
    "torchrun": "kill -9 under torchrun itself",
}


def done(digest: str | None = None) -> list[Result]:
    """The last result of each piece; given a digest, only those of that code.

    A line may be of several pieces, and then has their sums.
    """
    if not RESULTS.is_file():
        return []
    last: dict[tuple[str, int], Result] = {}
    for line in RESULTS.read_text().splitlines():
        result = json.loads(line)
        if result["digest"] if digest is None else result["digest"] == digest:
            for piece in result["pieces"]:
                last[result["part"], piece] = result
    known = [r for (part, piece), r in last.items() if piece < PARTS[part][1]]
    # a sum cannot be split: if a piece of it was run again, the others must be as well
    return [
        r
        for r in {id(r): r for r in known}.values()
        if all(last[r["part"], piece] is r for piece in r["pieces"])
    ]


def left(results: list[Result]) -> dict[str, list[int]]:
    """Pieces without a result, by part."""
    known = {(r["part"], piece) for r in results for piece in r["pieces"]}
    return {
        part: [n for n in range(pieces) if (part, n) not in known]
        for part, (_, pieces) in PARTS.items()
    }


def run_pieces(minutes: float, only: list[str], again: bool = False) -> None:
    """Every piece that is not done, until the time is over."""
    end = time.monotonic() + 60 * minutes
    require_committed()
    for part, pieces in left(done(code() if again else None)).items():
        for piece in pieces if not only or part in only else ():
            if time.monotonic() > end:
                return
            require_committed()
            run_piece(part, piece, PARTS[part][0])


def run_piece(part: str, piece: int, function: Callable[[int], Result]) -> None:
    """One piece, kept with the code that it was run with."""
    began, digest, commit = time.monotonic(), code(), _git("rev-parse", "HEAD")[:9]
    result: Result = {"part": part, "pieces": [piece]}
    try:
        result |= function(piece)
    except Exception as error:  # the other pieces are still to be run
        said = f"{type(error).__name__}: {error}"
        result |= {"faults": 0, "lost": 1, "diverged": 0, "error": said}
    # changed meanwhile: then nobody knows which code it was
    result["digest"] = digest if digest == code() else ""
    result["commit"] = commit
    result["seconds"] = round(time.monotonic() - began, 1)
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)


def require_committed() -> None:
    """End if nobody could tell later which code a result is of."""
    if not code():
        sys.exit("The soak runs committed code: commit src and tests/faults.")


def code() -> str:
    """Git's digest of the sources that are run; empty if files differ from it."""
    if _git("status", "--porcelain", "--", "src", "lab/src", "tests/faults"):
        return ""
    return "+".join(_git("rev-parse", f"HEAD:{p}")[:12] for p in ("src", "lab/src"))


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.check_output(command, text=True).strip()


def report() -> str:
    """All results, as a page."""
    results = done()
    lines = [
        "# Soak: faults, a long run, random arguments",
        "",
        "From `make soak` (`tests/faults/soak.py`, which says what each part does). "
        f"torch {torch.__version__.split('+')[0]}, gloo, one machine with two cores. "
        "Each row names the commits that it was run on.",
        "",
        "| faults | injected | runs lost | ranks or curves that diverged | on |",
        "|---|---|---|---|---|",
    ]
    total = Counter[str]()
    for part, words in WORDS.items():
        mine = [r for r in results if r["part"] == part]
        sums = {k: sum(r[k] for r in mine) for k in ("faults", "lost", "diverged")}
        total.update(sums)
        if mine:
            numbers = " | ".join(str(n) for n in sums.values())
            lines.append(f"| {words} | {numbers} | {_commits(mine)} |")
    lines.append(
        f"| all | {total['faults']} | {total['lost']} | {total['diverged']} | |"
    )
    lines += ["", *_kind_words(results)]
    lines += [*_long_words(results), *_random_words(results)]
    lines += _open_words(results)
    return "\n".join(lines) + "\n"


def _commits(results: list[Result]) -> str:
    """Which code they are of, with the number of pieces if there are several."""
    met = Counter[str]()
    for r in results:
        met[r["commit"]] += len(r["pieces"])
    if len(met) == 1:
        return next(iter(met))
    return ", ".join(f"{commit} ({n} pieces)" for commit, n in met.items())


def _kind_words(results: list[Result]) -> list[str]:
    """How often each kind was met by ranks of the library, and the longest wait."""
    parts = ("cells", "sharded")
    mine = [r for r in results if r["part"] in parts and "kinds" in r]
    if not mine:
        return []
    met, lost = Counter[str](), Counter[str]()
    for r in mine:
        met.update(r["kinds"])
        lost.update(r["lost kinds"])
    waits = {k: max(r["slowest"].get(k, 0.0) for r in mine) for k in met}
    sizes = dict(zip(parts, (len(CELLS), len(SHARDED)), strict=True))
    ways = len({(r["part"], n % sizes[r["part"]]) for r in mine for n in r["pieces"]})
    unnamed = sum(r["unnamed"] for r in mine)
    told = {kind: f"{wait:.1f}" if wait else "" for kind, wait in waits.items()}
    rows = [f"| {k} | {met[k]} | {lost[k]} | {told[k]} |" for k in sorted(met)]
    return [
        f"Of ranks, in {ways} ways to train. A setting, weight or gradient that one "
        "rank has differently must be named by one error on all, after which all go "
        "on. What ends a rank must end the survivors, who name it, and all start again "
        "from the last checkpoint. The end must be that of an undisturbed run, to the "
        "last bit.",
        "",
        "| kind | injected | lost | longest wait of a survivor, s |",
        "|---|---|---|---|",
        *rows,
        "",
        f"In {unnamed} of them a survivor was ended by an error of an exchange of DDP "
        "or fully_shard, which names nobody.",
        "",
    ]


def _open_words(results: list[Result]) -> list[str]:
    """What this page does not show."""
    words: list[str] = []
    missing = {part: len(pieces) for part, pieces in left(results).items() if pieces}
    if missing:
        listed = ", ".join(f"{part} ({n})" for part, n in missing.items())
        words += ["", f"**Incomplete.** Pieces that were not run: {listed}."]
    summed = [r["part"] for r in results if "from" in r]
    if summed:
        note = "only their sums were kept, not the lines of single pieces"
        words += ["", f"Of {', '.join(summed)}: {note}."]
    return words


def _long_words(results: list[Result]) -> list[str]:
    words: list[str] = []
    for r in results:
        if r["part"] == "long":
            words += [
                f"{r['steps']:,} steps of training (SPNGD, an MLP on digits, one "
                f"process, checkpoints on the way): {r['rss'][1]} MB resident after "
                f"2,200 steps, {r['rss'][2]} MB at the end, {r['slope']:+.2f} MB in "
                f"10,000 steps by least squares. Before and after: threads "
                f"{r['before']['threads']} and {r['after']['threads']}, open files "
                f"{r['before']['files']} and {r['after']['files']}, child processes "
                f"{r['before']['processes']} and {r['after']['processes']}; "
                f"{r['hooks']} hooks of any kind left on modules, parameters and the "
                f"optimizer. More than {SLOPE:g} MB in 10,000 steps, or any growth of "
                f"the others, would count as lost. On {r['commit']}.",
                "",
            ]
    return words


def _random_words(results: list[Result]) -> list[str]:
    words: list[str] = []
    for part, what in (
        ("arguments", "constructor arguments"),
        ("states", "state dicts"),
    ):
        mine = [r for r in results if r["part"] == part]
        tried, works = (sum(r[k] for r in mine) for k in ("examples", "works"))
        if mine:
            words.append(
                f"- {tried:,} random {what}: {works:,} accepted and working, "
                f"{tried - works:,} refused with a message that names what is wrong, "
                f"0 else. On {_commits(mine)}."
            )
    return words


def main() -> int:
    """Run pieces, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", dest="minutes", type=float, default=1e9)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not asked.report:
        preload()
        run_pieces(asked.minutes, asked.only, asked.again)
    results = done()
    missing = sum(len(pieces) for pieces in left(results).values())
    REPORT.write_text(report())
    print(f"{REPORT} is written; {missing} pieces are still to be run.")
    return int(any(r["lost"] or r["diverged"] for r in results))


if __name__ == "__main__":
    if shutil.which("ps") is None:
        sys.exit("The soak needs ps.")
    sys.exit(main())
