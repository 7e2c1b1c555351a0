"""Train in this tree and in another commit's, and compare to the last bit.

    python -m benchmarks.same --against COMMIT
    python -m benchmarks.same --against COMMIT --only EKFAC --list

Checks the commit out beside this one, runs every case of ``cases.py`` in both trees,
20 steps on one rank and on three (gloo, one thread each), and compares SHA-256 digests
of weights and buffers, of all tensors that the optimizer would save (whatever they are
called), and how often each statistic was refreshed. The exit status is 1 if anything
differs or fails. This tree is as it stands, changes without a commit included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.same.cases import CASES, Case

HERE = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("driver.py")
Outcomes = dict[str, list[dict[str, Any]]]  # by world, then rank, then case


@contextmanager
def checked_out(commit: str) -> Generator[Path]:
    """A folder with the files of a commit, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="natgrad-same-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run(
            [*git, "add", "--quiet", "--detach", str(tree), commit], check=True
        )
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


class Run:
    """The driver at work in one tree."""

    def __init__(self, tree: Path, cases: Mapping[str, Case]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out = Path(self._folder.name, "outcomes.json")
        paths = (tree / "src", tree / "lab/src", tree)
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER), str(tree), str(self._out)],
            cwd=tree,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(p) for p in paths if p.is_dir()),
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdin=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            json.dump({name: asdict(case) for name, case in cases.items()}, pipe)

    def outcomes(self) -> Outcomes:
        """Wait for it and read what it found."""
        with self._folder:
            if self._process.wait():
                raise SystemExit(f"The driver failed in {self._process.args}.")
            return json.loads(self._out.read_text())


def verdict(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """In a few words how two outcomes of one case on one rank compare."""
    for where, outcome in (("before", old), ("now", new)):
        if "error" in outcome:
            return f"fails {where}: {outcome['error']}"
    differ: list[str] = []
    if old["weights"] != new["weights"]:
        differ.append("weights")
    before, now = Counter(old["state"]), Counter(new["state"])
    if before != now:
        lost, found = (before - now).total(), (now - before).total()
        differ.append(f"state ({lost} of {before.total()} tensors are {found} others)")
    if old["refreshes"] != new["refreshes"]:
        differ.append("refreshes")
    return f"differs: {', '.join(differ)}" if differ else "equal"


def compare(old: Outcomes, new: Outcomes) -> dict[str, dict[str, str]]:
    """By case and number of ranks: "equal", or what the first such rank has else."""
    table: dict[str, dict[str, str]] = {}
    for world, ranks in new.items():
        for name in ranks[0]:
            pairs = zip(old[world], ranks, strict=True)
            found = [verdict(before[name], now[name]) for before, now in pairs]
            bad = [
                text if len(found) == 1 else f"rank {rank} {text}"
                for rank, text in enumerate(found)
                if text != "equal"
            ]
            table.setdefault(name, {})[world] = bad[0] if bad else "equal"
    return table


def written(table: Mapping[str, Mapping[str, str]]) -> str:
    """A row for each case, a column for each number of ranks; then what differs."""
    worlds = sorted({world for row in table.values() for world in row}, key=int)
    heads = {w: f"{w} rank{'' if w == '1' else 's'}" for w in worlds}
    rows = [["case", *heads.values()]]
    details: list[str] = []
    for name, row in table.items():
        found = {w: row.get(w, "-") for w in worlds}
        rows.append(
            [name, *(x if x in ("equal", "-") else "NOT" for x in found.values())]
        )
        details += [
            f"{name}, {heads[w]}: {text}"
            for w, text in found.items()
            if text not in ("equal", "-")
        ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    count = sum(len(row) for row in table.values())
    total = f"{len(table)} cases, {count} comparisons: {count - len(details)} equal"
    return "\n".join([*lines, "", *details, f"{total}, {len(details)} not."])


def chosen(only: str) -> dict[str, Case]:
    """The cases whose name contains a text."""
    cases = {name: case for name, case in CASES.items() if only in name}
    if not cases:
        raise SystemExit(f"No case contains {only!r}. See --list.")
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", default="HEAD")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases named so")
    parser.add_argument("--list", action="store_true", help="names, and no run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all digests")
    asked = parser.parse_args()
    cases = chosen(asked.only)
    if asked.list:
        print("\n".join(cases))
        return
    with checked_out(asked.against) as tree:
        runs = [Run(tree, cases), Run(HERE, cases)]  # side by side
        old, new = (run.outcomes() for run in runs)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"before": old, "now": new}, indent=1))
    table = compare(old, new)
    print(written(table))
    sys.exit(any(text != "equal" for row in table.values() for text in row.values()))


if __name__ == "__main__":
    main()
