"""What a training step costs, next to SGD in the same process.

    python -m benchmarks.step_time                 # the default set: `make bench`
    python -m benchmarks.step_time --quick         # tiny models: seconds, no meaning
    python -m benchmarks.step_time --only mlp gpt --threads 1

Writes step_time.json, step_time.md and step_time.png. See the notes in `common` on
kinds of steps, interleaving and clocks.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory, phases
from benchmarks.cases import CASES, QUICK_CASES, Case
from benchmarks.common import (
    ADAPTIVE,
    BASELINE,
    EVERY_STEP,
    RESULTS,
    TEN_HUNDRED,
    Contender,
    describe,
    interleave,
    keep_memory,
    machine,
    markdown_table,
    megabytes,
    say,
    summarise,
    tensor_bytes,
    write_json,
)
from benchmarks.contenders import MAKERS, WITH_MORE_THREADS, make_all
from benchmarks.figures import step_time_figure

TARGETS: dict[tuple[str, str], float] = {
    ("resnet20", EVERY_STEP): 1.9,
    ("resnet20", TEN_HUNDRED): 1.08,
    ("resnet32", EVERY_STEP): 1.9,
    ("resnet32", TEN_HUNDRED): 1.08,
    ("digits", TEN_HUNDRED): 1.3,
    ("mlp", EVERY_STEP): 4.0,
    ("mlp", TEN_HUNDRED): 1.8,
}
"""Ratios to SGD to stay under, with one thread."""

IN_SHORT = ("resnet20", "mlp", "gpt")
"""Cases of the figure that the readme shows."""
STATE = "state, momentum apart"
STATE_TARGETS = {
    "natgrad KFAC eigen": 15.0,
    "natgrad SPNGD": 10.0,
    "natgrad Polar": 9.0,
}
"""MB that ResNet-20 may keep beside momentum: with running averages, and without."""

METHOD = """\
Each ratio is the mean cost of a step over the cost of an SGD step (momentum 0.9) in the
same round, in which contenders take turns, one step at a time: the median over rounds,
with their quartiles as `spread`. *full* is a step that makes statistics and inverses,
*statistics* one that makes statistics only, *plain* one that makes neither. `every
step` is the full step; `10/100` (statistics every 10 steps, inverses every 100) weighs
the three kinds 1 : 9 : 90; `1/10` and `1/100` of peers with two kinds likewise;
`adaptive` is the mean of the steps that were run, with the share of statistics
refreshed in them. With 1 thread times are CPU seconds of the process, with more wall
seconds. `state` is what the optimizer keeps after a full step, momentum
included; `peak` is memory at the highest point of the costliest kind of step, beyond
what an SGD step takes. The allocator keeps freed memory (`MALLOC_MMAP_THRESHOLD_`,
`MALLOC_TRIM_THRESHOLD_`)."""


def measure(
    name: str, case: Case, threads: int, options: Any, details: bool = True
) -> dict[str, Any]:
    """One case with one number of threads; ``details`` are memory and phases."""
    torch.set_num_threads(threads)
    clock = "cpu" if threads == 1 else "wall"
    say(f"{case.label}, batch {case.batch}, {threads} thread(s)")
    names = options.contenders or ([] if details or case.slow else WITH_MORE_THREADS)
    contenders = make_all(case, options.layout, names, say)
    samples = interleave(
        contenders,
        seconds=case.seconds[threads] * options.scale,
        least=1 if options.quick else 2 if case.slow or not details else 3,
        most=1 if options.quick else 60,
        say=lambda text: say(f"  {text}"),
    )
    rows = summarise(samples, contenders, clock)
    rounds = 1 if options.quick or case.slow else 2
    sizes = memory_of(contenders) if details else {}
    for row in rows:
        row |= sizes.get(row["contender"], {})
    for row in rows:
        if row["contender"] != BASELINE:
            say(f"  {row['contender']:28} {row['policy']:10} {row['ratio']:6.2f}x")
    return {
        "case": name,
        "label": case.label,
        "batch": case.batch,
        "threads": threads,
        "clock": clock,
        "layout": options.layout if case.images else "contiguous",
        "rows": rows,
        "phases": phases_of(contenders, clock, rounds) if details else {},
    }


def memory_of(contenders: list[Contender]) -> dict[str, dict[str, Any]]:
    """Bytes kept and, beyond an SGD step, bytes at the peak of the costliest step."""
    base = memory.peak(contenders[0], contenders[0].kinds[0])
    found: dict[str, dict[str, Any]] = {}
    for c in contenders:
        highest = memory.peak(c, c.kinds[0])
        # Now: a cycle begins with its full step, after which nothing waits for the next
        # inverse.
        state = c.state()
        for i, kind in enumerate(c.kinds[1:], start=1):
            if kind in c.kinds[:i]:
                c.step()  # to the end of the cycle: the next step must be its first
            else:
                highest = max(highest, memory.peak(c, kind))
        found[c.name] = {
            "state_bytes": None if state is None else tensor_bytes(state),
            "peak_bytes": max(0, highest - base),
        }
    return found


def phases_of(contenders: list[Contender], clock: str, rounds: int) -> dict[str, Any]:
    """Seconds by kind and phase of natgrad's contenders."""
    return {
        c.name: phases.measure(c, clock, rounds)
        for c in contenders
        if c.target is not None and ADAPTIVE not in c.policies
    }


# -- reports --------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """One case in markdown."""
    header = ("contender", "refresh", "ratio", "spread", "ms", "state MB", "peak MB")
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        note = f" ({row['refreshed']:.0%} refreshed)" if "refreshed" in row else ""
        base = row["contender"] == BASELINE
        rows.append(
            (
                row["contender"],
                "" if base else row["policy"] + note,
                f"{row['ratio']:.2f}x",
                f"{row['low']:.2f} to {row['high']:.2f}",
                f"{1e3 * row['seconds']:.1f}",
                megabytes(row.get("state_bytes")),
                megabytes(row.get("peak_bytes")),
            )
        )
    return markdown_table(header, rows)


def phase_table(result: dict[str, Any]) -> str:
    """Milliseconds by phase of one case."""
    header = ("contender", "kind of step", *phases.PHASES)
    rows = [
        (name, kind, *[f"{1e3 * seconds[p]:.1f}" for p in phases.PHASES])
        for name, kinds in result["phases"].items()
        for kind, seconds in kinds.items()
    ]
    return markdown_table(header, rows)


def targets(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of model, what, contender, target, measured, and the verdict."""
    rows: list[tuple[str, ...]] = []
    for result in results:
        for row in result["rows"] if result["threads"] == 1 else ():
            limit = TARGETS.get((result["case"], row["policy"]))
            if limit is not None and row["contender"].startswith("natgrad"):
                measured = (row["policy"], row["ratio"], limit, "x")
                rows.append(_judged(result, row["contender"], *measured))
        rows += _state_targets(result)
    return rows


def _state_targets(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """What is kept beside SGD's momentum, for the cases that have a limit."""
    if (result["case"], result["threads"]) != ("resnet20", 1):
        return []
    kept = {r["contender"]: r.get("state_bytes") for r in result["rows"]}
    return [
        _judged(result, name, STATE, (kept[name] - kept[BASELINE]) / 1e6, limit, " MB")
        for name, limit in STATE_TARGETS.items()
        if kept.get(name) is not None
    ]


def _judged(
    result: dict[str, Any],
    contender: str,
    what: str,
    measured: float,
    limit: float,
    unit: str,
) -> tuple[str, ...]:
    digits = 2 if unit == "x" else 1
    verdict = "met" if measured <= limit else "missed"
    cells = (f"{limit:g}{unit}", f"{measured:.{digits}f}{unit}", verdict)
    return (result["label"], what, contender, *cells)


def report(facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The whole run in markdown."""
    parts = ["# What a step costs", describe(facts), METHOD]
    judged = targets(results)
    if judged:
        header = ("model", "what", "contender", "target", "measured", "")
        parts += ["## Targets (1 thread)", markdown_table(header, judged)]
    for result in results:
        threads = f"{result['threads']} thread" + "s" * (result["threads"] > 1)
        parts.append(f"## {result['label']}, batch {result['batch']}, {threads}")
        if result.get("commit") != facts.get("commit"):
            made = result.get("commit") or "an earlier state of the code"
            parts.append(f"Measured on {made}.")
        parts.append(table(result))
        if result["phases"]:
            parts += ["Milliseconds by phase:", phase_table(result)]
    return "\n\n".join(parts) + "\n"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny models, one round")
    add("--only", nargs="+", default=[], metavar="CASE", help=", ".join(CASES))
    add("--contenders", nargs="+", default=[], choices=MAKERS, metavar="NAME")
    add("--threads", nargs="+", type=int, default=[1, 2])
    add("--scale", type=float, default=1.0, help="times the time budget")
    add("--keep", action="store_true", help="keep other cases of the last run")
    add("--layout", choices=("contiguous", "channels_last"), default="contiguous")
    add("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.cases = QUICK_CASES if options.quick else CASES
    unknown = set(options.only) - set(options.cases)
    if unknown:
        parser.error(f"Invalid --only {unknown}. Must be among {list(options.cases)}.")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run, print and write."""
    options = parse(arguments)
    if arguments is None:
        keep_memory("benchmarks.step_time")
    results: list[dict[str, Any]] = kept(options) if options.keep else []
    facts = machine() | {"settings": {"layout": options.layout}}
    for name, case in options.cases.items():
        if options.only and name not in options.only:
            continue
        counts = sorted(set(options.threads) & set(case.seconds))
        if name in options.only:
            counts = options.threads
        for threads in counts:
            budget = case.seconds.get(threads, max(case.seconds.values()))
            timed = dataclasses.replace(case, seconds={threads: budget})
            # memory does not depend on threads, and phases hardly do
            details = threads == counts[0]
            found = measure(name, timed, threads, options, details)
            # of the code that this process has loaded: results are files too
            found["commit"] = facts["commit"]
            results = [r for r in results if _place(r) != _place(found)] + [found]
            results.sort(key=_place)
            # after each, so that a run that is stopped leaves what it has
            write_json(
                options.out / "step_time.json", {"machine": facts, "cases": results}
            )
    (options.out / "step_time.md").write_text(report(facts, results))
    step_time_figure(results, options.out / "step_time.png")
    few = [r for r in results if r["case"] in IN_SHORT and r["threads"] == 1]
    step_time_figure(few, options.out / "step_time_short.png")
    for row in targets(results):
        say("  ".join(row))
    say(f"written to {options.out}")


def kept(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases of the last run, to which those of this one are added."""
    return json.loads((options.out / "step_time.json").read_text())["cases"]


def _place(result: dict[str, Any]) -> tuple[int, int]:
    names = [*CASES, *QUICK_CASES]
    return names.index(result["case"]), result["threads"]


if __name__ == "__main__":
    main()
