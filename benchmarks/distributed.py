"""What a step costs on two ranks, next to data-parallel SGD in the same processes.

    python -m benchmarks.distributed
    python -m benchmarks.distributed --quick --only spngd

All strategies, with communication under the backward (overlap) and after it; bytes a
step by exchange; and a trace of a step. Writes distributed.json, distributed.md and
overlap_trace.json.gz, which chrome://tracing and Perfetto open.

Ranks are processes on this machine with gloo over loopback, one thread each. Seconds
are wall seconds of the slowest rank, from a barrier to the end of the step.
"""

import argparse
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import record_function

import natgrad
from benchmarks import trace
from benchmarks.cases import CASES, QUICK_CASES, Case, cross_entropy
from benchmarks.common import (
    BASELINE,
    EVERY_STEP,
    FULL,
    REFRESHING,
    RESULTS,
    Contender,
    Sample,
    Samples,
    describe,
    interleave,
    keep_memory,
    machine,
    markdown_table,
    megabytes,
    run_step,
    say,
    summarise,
    write_json,
)
from benchmarks.contenders import CYCLE, LR, cycle

WORLD = 2
STRATEGIES: dict[str, tuple[Any, str]] = {
    "spngd": ("spngd", "factored"),
    "layer_wise": ("layer_wise", "eigen"),
    "factor_wise": ("factor_wise", "eigen"),
    "factor_wise factored": ("factor_wise", "factored"),
    "hybrid(0.5)": (natgrad.hybrid(0.5), "eigen"),
}
"""Strategy and style of inverses: the defaults of SPNGD and KFAC, and one more."""
CURVATURE = ("reduce_statistics", "share_inverses")
RATIO_TARGET = 2.0
PEER_BYTES = {"reduce_statistics": 9.4e6, "share_inverses": 10.4e6}
"""kfac-pytorch, ResNet-20: all-reduced statistics and broadcast inverses a full step.
"""

METHOD = f"""\
{WORLD} ranks, gloo over loopback, one thread a rank. `ratio` is to SGD under
DistributedDataParallel in the same processes, taking turns; wall seconds of the slowest
rank. `spngd` is `natgrad.SPNGD` on the plain module, the others are `natgrad.KFAC` on a
model in DistributedDataParallel, with eigendecompositions unless it says "factored"
(Cholesky inverses, sent as triangles). `every step` is the median full step, `10/100`
is computed from the medians of full, statistics and plain steps, weighted 1 : 9 : 90.
MB are what all ranks together hand over in a full step, as `traffic()` counts them:
gradients are in it where natgrad moves them, and not where DDP does. kfac-pytorch's
figures for ResNet-20 are 9.4 MB all-reduced for statistics (counted once, though every
rank hands them over) and 10.4 MB broadcast for inverses."""


def training_step(
    model: nn.Module, optimizer: Optimizer, case: Case, rank: int
) -> Callable[[], None]:
    """A step whose parts have names in a trace."""
    batches = itertools.cycle(case.batches(seed=rank))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        with record_function("forward"):
            loss = cross_entropy(model(x), y)
        with record_function(trace.BACKWARD):
            loss.backward()
        with record_function("optimizer step"):
            optimizer.step()

    return step


def baseline(case: Case, rank: int) -> Contender:
    """SGD under DistributedDataParallel."""
    model = DistributedDataParallel(case.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    return Contender(
        name=BASELINE,
        step=training_step(model, optimizer, case, rank),
        prepare=lambda kind: dist.barrier(),
    )


def contender(
    case: Case, rank: int, name: str, overlap: bool, bucket: int
) -> Contender:
    """natgrad with one strategy; without overlap only full steps are measured."""
    kinds = CYCLE if overlap else (FULL,)
    comm = natgrad.CommOptions(overlap=overlap, bucket_bytes=bucket)
    strategy, style = STRATEGIES[name]
    shared: dict[str, Any] = {
        "refresh": cycle(kinds),
        "comm": comm,
        "rule": natgrad.Kronecker(style=style),
        "strategy": strategy,
    }
    if strategy == "spngd":
        model = case.model()
        optimizer = curved = natgrad.SPNGD(
            model, lr=LR, options=replace(natgrad.SPNGD.defaults, **shared)
        )
    else:
        model = DistributedDataParallel(case.model())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        curved = natgrad.KFAC(
            model, optimizer, options=replace(natgrad.KFAC.defaults, **shared)
        )
    policies = REFRESHING if overlap else {EVERY_STEP: {FULL: 1}}
    return Contender(
        name=f"{name}, overlap {'on' if overlap else 'off'}",
        step=training_step(model, optimizer, case, rank),
        kinds=kinds,
        policies=policies,
        prepare=lambda kind: dist.barrier(),
        target=curved,
    )


# -- what a rank does -----------------------------------------------------------------


def agree(more: bool) -> bool:
    """Rank 0's answer, on all ranks."""
    box = [more]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def slowest(samples: Samples) -> Samples:
    """The same samples with the longest time of any rank."""
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, samples)
    return {
        key: [
            Sample(
                round=each[0].round,
                wall=max(s.wall for s in each),
                cpu=max(s.cpu for s in each),
            )
            for each in zip(*[ranks[key] for ranks in everyone], strict=True)
        ]
        for key in samples
    }


def sent(c: Contender) -> dict[str, dict[str, int]]:
    """Bytes by kind of step and exchange, over all ranks, in one cycle."""
    found: dict[str, dict[str, int]] = {}
    for kind in c.kinds:
        before = _sent_so_far(c.target)
        run_step(c, kind)
        now = _sent_so_far(c.target)
        mine = {name: now[name] - before.get(name, 0) for name in now}
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, mine)
        found[kind] = {n: sum(x.get(n, 0) for x in everyone) for n in mine}
    return found


def _sent_so_far(curved: Any) -> dict[str, int]:
    total = curved.traffic()["total"]
    return {exchange: counts["sent"] for exchange, counts in total.items()}


def record_trace(c: Contender, out: Path) -> dict[str, Any]:
    """Write the trace of a full step; says how many collectives ran under backward."""
    path = out / "overlap_trace.json.gz"
    for kind in c.kinds:
        c.prepare(kind)
        if kind == FULL and dist.get_rank() == 0:
            trace.record(c.step, path)
        else:
            c.step()
    if dist.get_rank() != 0:
        return {}
    events = trace.read(path)
    return {
        "contender": c.name,
        "collectives": sum(map(trace.is_collective, events)),
        "sent_early": len(trace.sent_early(events)),
        "under_backward": len(trace.find_overlap(events)),
    }


def rank_main(rank: int, port: int, options: Any) -> None:
    """The whole benchmark, as one rank lives it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=300)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=limit
    )
    talk = say if rank == 0 else lambda text: None
    case = QUICK_CASES["resnet8"] if options.quick else CASES["resnet20"]
    talk(f"{case.label}, batch {case.batch} on each of {WORLD} ranks")
    contenders = [baseline(case, rank)]
    for name, overlap in itertools.product(options.only, (True, False)):
        contenders.append(contender(case, rank, name, overlap, options.bucket))
    samples = interleave(
        contenders,
        seconds=0.0 if options.quick else options.seconds,
        least=1 if options.quick else 3,
        go_on=agree,
        say=lambda text: talk(f"  {text}"),
    )
    samples = slowest(samples)
    traffic = {c.name: sent(c) for c in contenders[1:]}
    overlap = record_trace(contenders[1], options.out)
    if rank == 0:
        rows = summarise(samples, contenders, "wall")
        publish(case, rows, traffic, overlap, options)
    dist.barrier()
    dist.destroy_process_group()


# -- reports --------------------------------------------------------------------------


def publish(
    case: Case,
    rows: list[dict[str, Any]],
    traffic: dict[str, Any],
    overlap: dict[str, Any],
    options: Any,
) -> None:
    """Print and write, on rank 0."""
    facts = machine()
    settings = {
        "world": WORLD,
        "batch": case.batch,
        "bucket_bytes": options.bucket,
    }
    for row in rows:
        row["sent_bytes"] = traffic.get(row["contender"])
    write_json(
        options.out / "distributed.json",
        {
            "machine": facts,
            "case": case.label,
            "settings": settings,
            "rows": rows,
            "trace": overlap,
        },
    )
    parts = [
        "# What a step costs on several ranks",
        describe(facts),
        METHOD,
        f"{case.label}, batch {case.batch} a rank, buckets of "
        f"{options.bucket / 1e6:.2f} MB.",
        table(rows),
        verdict(rows),
        f"Trace of a full step ({overlap['contender']}): of {overlap['collectives']} "
        f"collectives {overlap['sent_early']} left before the last operation of the "
        f"backward, and {overlap['under_backward']} were under way as another began.",
    ]
    text = "\n\n".join(parts) + "\n"
    (options.out / "distributed.md").write_text(text)
    say(text)


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each contender and policy."""
    header = (
        "contender",
        "refresh",
        "ratio",
        "spread",
        "ms",
        "statistics MB",
        "inverses MB",
        "gradients MB",
        "updates MB",
    )
    lines: list[tuple[str, ...]] = []
    for row in rows:
        bytes_ = (row["sent_bytes"] or {}).get(FULL, {})
        full = row["policy"] == EVERY_STEP and row["contender"] != BASELINE
        moved = [
            megabytes(bytes_.get(name, 0)) if full else ""
            for name in (*CURVATURE, "reduce_gradients", "share_updates")
        ]
        lines.append(
            (
                "DDP SGD" if row["contender"] == BASELINE else row["contender"],
                "" if row["contender"] == BASELINE else row["policy"],
                f"{row['ratio']:.2f}x",
                f"{row['low']:.2f} to {row['high']:.2f}",
                f"{1e3 * row['seconds']:.0f}",
                *moved,
            )
        )
    return markdown_table(header, lines)


def verdict(rows: list[dict[str, Any]]) -> str:
    """Each full step against the targets."""
    limit = sum(PEER_BYTES.values()) / 3
    lines: list[str] = []
    for row in rows:
        if row["policy"] != EVERY_STEP or row["contender"] == BASELINE:
            continue
        moved = sum(row["sent_bytes"][FULL].get(name, 0) for name in CURVATURE)
        fast = "met" if row["ratio"] <= RATIO_TARGET else "missed"
        small = "met" if moved <= limit else "missed"
        lines.append(
            f"- {row['contender']}: {row['ratio']:.2f}x against {RATIO_TARGET}x, "
            f"{fast}; {moved / 1e6:.1f} MB of statistics and inverses against "
            f"{limit / 1e6:.1f} MB, {small}."
        )
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, one round")
    add("--only", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    add("--seconds", type=float, default=90.0, help="time budget")
    add("--bucket", type=int, default=2**18, help="bytes of a bucket")
    add("--out", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Start the ranks and wait for them."""
    options = parse(arguments)
    if arguments is None:
        keep_memory("benchmarks.distributed")
    options.out.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(rank_main, (store.port, options), nprocs=WORLD)


if __name__ == "__main__":
    main()
