"""What the benchmarks share: interleaved timing, summaries, machine facts, tables.

Note [Kinds of steps]
A policy such as "statistics every 10, inverses every 100" has three kinds of steps:
*full* (statistics and inverses), *statistics* and *plain*. Each kind is measured on its
own and the mean cost is computed exactly from the counts in one cycle of the policy,
here 1 + 9 + 90. So a hundred steps cost three measurements, and no luck in where the
rare expensive step falls.

Note [Interleaving]
Contenders take turns, one step of each kind a round, so that noise and clock changes
hit all equally; the order rotates from round to round. The baseline takes a turn after
every few others. Ratios are taken within one run only.

Note [Clocks]
With one thread, seconds are CPU seconds of the process (`time.process_time`): what
other programs take from the machine is left out, and nothing here waits. With more,
CPU seconds would count threads that spin, so seconds are wall seconds. Both are kept.
"""

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from natgrad_lab.train.run import git_state

RESULTS = Path(__file__).parent / "results"
CODE = (":/src", ":/lab", ":/benchmarks", ":(top,exclude)benchmarks/results")
PEERS = ("pytorch_optimizer", "kfac-pytorch", "asdl")
PACKAGES = ("natgrad", "torch", "numpy", *PEERS)
BASELINE = "SGD"
BASELINE_EVERY = 4

# By default glibc returns every large block to the system and faults it in again, which
# costs a step 12% and more, and not the same in every step.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(10**9), "MALLOC_TRIM_THRESHOLD_": "4" * 10}

FULL, STATISTICS, PLAIN = "full", "statistics", "plain"
EVERY_STEP, TEN_HUNDRED, ADAPTIVE = "every step", "10/100", "adaptive"

Policies = Mapping[str, Mapping[str, int]]
"""Policy name -> kind of step -> how many of them are in one cycle."""

ALWAYS: Policies = {EVERY_STEP: {PLAIN: 1}}
REFRESHING: Policies = {
    EVERY_STEP: {FULL: 1},
    TEN_HUNDRED: {FULL: 1, STATISTICS: 9, PLAIN: 90},
}


def keep_memory(module: str) -> None:
    """Start this program again with an allocator that keeps what is freed."""
    if not KEEP_MEMORY.items() <= os.environ.items():
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **KEEP_MEMORY})


@dataclass(kw_only=True)
class Contender:
    """One model with its optimizer.

    Attributes:
        step: a whole training step: forward, backward, update.
        kinds: the kinds of steps it goes through in each round, in this order.
        policies: how kinds are weighted.
        prepare: called, untimed, before a step, with the kind it is to be.
        mean: steps of one kind differ in cost (adaptive): average instead of median.
        max_rounds: sits out after so many rounds (for slow peers).
        state: the tensors it keeps, nested in any way; for the count of bytes.
        facts: more to report when the run is over.
        target: the object that `phases` should look into, if it is natgrad's.
    """

    name: str
    step: Callable[[], None]
    kinds: tuple[str, ...] = (PLAIN,)
    policies: Policies = field(default_factory=lambda: ALWAYS)
    prepare: Callable[[str], None] = lambda kind: None
    mean: bool = False
    max_rounds: int = 1000
    state: Callable[[], Any] = lambda: None
    facts: Callable[[], dict[str, Any]] = lambda: {}
    target: Any = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Seconds of one step."""

    round: int
    wall: float
    cpu: float


Samples = dict[tuple[str, str], list[Sample]]


def run_step(contender: Contender, kind: str, round_: int = 0) -> Sample:
    """Time one step; garbage is collected outside of the time."""
    contender.prepare(kind)
    wall, cpu = time.perf_counter(), time.process_time()
    contender.step()
    return Sample(
        round=round_,
        wall=time.perf_counter() - wall,
        cpu=time.process_time() - cpu,
    )


def turns(
    contenders: Sequence[Contender], round_: int
) -> Iterator[tuple[Contender, str]]:
    """The steps of one round. See Note [Interleaving]."""
    baseline, others = contenders[0], list(contenders[1:])
    shift = round_ % max(1, len(others))
    active = [c for c in others[shift:] + others[:shift] if round_ <= c.max_rounds]
    yield baseline, baseline.kinds[0]
    steps = [(c, kind) for c in active for kind in c.kinds]
    for i, step in enumerate(steps):
        if i and i % BASELINE_EVERY == 0:
            yield baseline, baseline.kinds[0]
        yield step


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, and not again until the end."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interleave(
    contenders: Sequence[Contender],
    *,
    seconds: float,
    least: int = 3,
    most: int = 60,
    go_on: Callable[[bool], bool] = lambda more: more,
    say: Callable[[str], None] = lambda text: None,
) -> Samples:
    """Rounds of single steps for about ``seconds``, after a round that is not counted.

    The first contender is the baseline. ``go_on`` lets several processes agree.
    """
    samples: Samples = {}
    began = time.monotonic()
    for round_ in range(most + 1):
        round_began = time.monotonic()
        with no_garbage_collection():
            for contender, kind in turns(contenders, round_):
                sample = run_step(contender, kind, round_)
                if round_ > 0:
                    samples.setdefault((contender.name, kind), []).append(sample)
        spent = time.monotonic() - began
        say(f"round {round_ or 'of warm-up'}: {spent:.0f} s of {seconds:.0f} s")
        # another round like this one must fit
        fits = spent + time.monotonic() - round_began <= seconds
        if not go_on(round_ < least or fits):
            break
    return samples


# -- summaries ------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def weighted(kinds: Mapping[str, float], weights: Mapping[str, int]) -> float:
    """The mean cost of a step over one cycle of a policy."""
    total = sum(kinds[kind] * weight for kind, weight in weights.items())
    return total / sum(weights.values())


def summarise(
    samples: Samples, contenders: Sequence[Contender], clock: str
) -> list[dict[str, Any]]:
    """A row for each contender and policy, with its ratio to the baseline.

    ``ratio``, ``low`` and ``high`` are the median and the quartiles of the ratios of
    single rounds, in which baseline and contender met the same noise. For an adaptive
    policy, whose steps differ by design, ``ratio`` is that of the means of all steps.
    """
    rows: list[dict[str, Any]] = []
    for c in contenders:
        centre = statistics.fmean if c.mean else statistics.median
        seconds = {k: _seconds(samples, c.name, k, clock) for k in c.kinds}
        base_name, base_kind = contenders[0].name, contenders[0].kinds[0]
        base = statistics.fmean(_seconds(samples, base_name, base_kind, clock))
        centres = {kind: centre(values) for kind, values in seconds.items()}
        for policy, weights in c.policies.items():
            cost = weighted(centres, weights)
            ratios = _ratios(samples, c, weights, contenders[0], clock)
            low, middle, high = quartiles(ratios)
            rows.append(
                {
                    "contender": c.name,
                    "policy": policy,
                    "seconds": cost,
                    "ratio": cost / base if c.mean else middle,
                    "low": low,
                    "high": high,
                    "steps": {kind: len(values) for kind, values in seconds.items()},
                    "kinds": centres,
                    "spread": {k: quartiles(v)[::2] for k, v in seconds.items()},
                    "weights": dict(weights),
                    "statistic": "mean" if c.mean else "median",
                    **c.facts(),
                }
            )
    return rows


def _seconds(samples: Samples, name: str, kind: str, clock: str) -> list[float]:
    return [getattr(s, clock) for s in samples[name, kind]]


def _ratios(
    samples: Samples,
    contender: Contender,
    weights: Mapping[str, int],
    baseline: Contender,
    clock: str,
) -> list[float]:
    """One ratio for each round."""
    rounds = sorted({s.round for s in samples[contender.name, contender.kinds[0]]})
    ratios: list[float] = []
    for r in rounds:
        costs = {
            kind: _mean_of_round(samples[contender.name, kind], r, clock)
            for kind in contender.kinds
        }
        base = _mean_of_round(samples[baseline.name, baseline.kinds[0]], r, clock)
        ratios.append(weighted(costs, weights) / base)
    return ratios


def _mean_of_round(samples: Sequence[Sample], r: int, clock: str) -> float:
    return statistics.fmean(getattr(s, clock) for s in samples if s.round == r)


# -- machine, files, tables -----------------------------------------------------------


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions; nothing that names a host or a user."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit that is measured; None if code differs from it. Results may."""
    state = git_state(*CODE)
    return None if state is None or state["dirty"] else state["commit"][:9]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe(facts: Mapping[str, Any]) -> str:
    """`machine()` in a line of markdown."""
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v)
    commit = facts.get("commit")
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        f"{facts['system']}; Python {facts['python']}, {versions}"
        + (f"; commit {commit}." if commit else ".")
    )


def write_json(path: Path, value: Any) -> None:
    """Numbers to six digits: the rest is noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(value), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(k): _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up in plain text too."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def megabytes(count: float | None) -> str:
    """Bytes as MB (10^6)."""
    return "" if count is None else f"{count / 1e6:.1f}"


def tensor_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Bytes of all tensors in nested containers, each storage once."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(tensor_bytes(x, seen) for x in value)
    return 0


def say(text: str) -> None:
    """Progress."""
    print(text, flush=True)
