"""What ranks can do together: exchanges against brute force, order, and who is lost.

Everything runs through the library's own `Communicator`, on plans of made-up layers.
Every rank computes what it must receive, and tells the others what was wrong.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad import CommError, CommOptions
from natgrad.distributed import Communicator
from natgrad.plan import (
    EXCHANGES,
    Plan,
    departures,
    flat,
    mine,
    reductions,
)
from natgrad_lab.simulate.collectives import made_up, plan_for, timed
from natgrad_lab.train.processes import World

WAYS = ("rooted", "padded")
STRATEGIES = ("spngd", "layer_wise", "factor_wise", "hybrid(0.5)", "sharded")
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
LARGE = 2**20
"""Elements of the sum that bandwidth is found by."""
SLOW = 3.0
"""Times the median seconds of all ranks, from which on a rank is called slow."""
PATIENCE = 2.0
"""Seconds until a rank that does not come is given up, in the planned cases."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was looked at, whether it is fit for use, and what was seen."""

    check: str
    good: bool
    detail: str


def examine(world: World, *, death: bool = True) -> Iterator[Finding]:
    """Everything, in an order in which what ends a rank comes last.

    If a rank is lost where none should be, the finding names it and is the last.
    """
    checks: list[Callable[[World], list[Finding]]] = [
        exchanges,
        order,
        precision,
        links,
        speed,
        late,
    ]
    for check in [*checks, died] if death else checks:
        try:
            yield from check(world)
        except CommError as error:
            lines = str(error).splitlines()
            yield Finding(check=check.__name__, good=False, detail=lines[0])
            return


def value(rank: int, name: str, elements: int) -> Tensor:
    """A float64 tensor that every rank can compute for every other."""
    seed = zlib.crc32(f"{rank} {name}".encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(elements, generator=generator, dtype=torch.float64)


def wrong(
    comm: Communicator,
    exchange: str,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
) -> list[str]:
    """Names of the items that an exchange did not bring as brute force has them."""
    moves, rank = comm.plan.exchanges[exchange], comm.rank
    flight = comm.begin(exchange, [i.name for i in moves.items], dtype, device)
    for item in moves.items:
        if rank in item.sources:
            source = rank if moves.reduces else item.sources[0]
            own = value(source, item.name, item.elements)
            flight.put(item.name, own.to(device, dtype))
    got = flight.finish()
    found: list[str] = []
    for item in moves.items:
        if rank not in item.destinations:
            continue
        if not moves.reduces and rank in item.sources:
            continue
        sources = item.sources if moves.reduces else item.sources[:1]
        parts = [value(r, item.name, item.elements) for r in sources]
        want = torch.stack(parts).sum(0)
        came = got[item.name].double().cpu()
        if not bool((came - want).abs().max() <= tolerance * want.abs().max()):
            found.append(item.name)
    return found


def _plan(world: World, strategy: str) -> Plan:
    return plan_for(made_up(5, 12), world.size, strategy)


def exchanges(world: World) -> list[Finding]:
    """Every exchange of every strategy, sent in every way."""
    found: list[Finding] = []
    for strategy in STRATEGIES:
        faults: list[str] = []
        for way in WAYS:
            options = CommOptions(collectives=way, bucket_bytes=2000, timeout=20.0)
            comm = Communicator(_plan(world, strategy), options)
            for exchange in EXCHANGES:
                said = comm.tell(wrong(comm, exchange, world.device))
                ranks = [rank for rank, names in enumerate(said) if names]
                if ranks:
                    faults.append(f"{exchange} ({way}) is wrong on ranks {ranks}")
            comm.close()
        detail = "; ".join(faults) or "every exchange as by brute force"
        found.append(Finding(check=strategy, good=not faults, detail=detail))
    return found


def order(world: World) -> list[Finding]:
    """Items put in another order on each rank, with pauses."""
    plan = _plan(world, "spngd")
    options = CommOptions(bucket_bytes=1, timeout=20.0)
    comm = Communicator(plan, options)
    legs = reductions(plan, [s.name for s in plan.statistics])
    walk = comm.begin_together(legs, torch.float32, world.device)
    comm.log = []
    chance = random.Random(world.rank)
    pairs = [(f, n) for f, x in zip(walk.flights, legs, strict=True) for n in x.names]
    for flight, name in chance.sample(pairs, len(pairs)):
        time.sleep(chance.random() / 500)
        (item,) = plan.exchanges[flight.exchange].select([name])
        flight.put(name, torch.zeros(item.elements, device=world.device))
    walk.send()
    ran = [m for m in comm.log if m.exchange in EXCHANGES]
    for flight in walk.flights:
        flight.finish()
    wiring = comm.wiring(torch.float32)
    planned = mine(flat(departures(plan, legs, wiring)[0]), world.rank)
    said = comm.tell(ran == planned)
    comm.close()
    odd = [rank for rank, same in enumerate(said) if not same]
    detail = f"ranks {odd} start collectives in another order" if odd else "the plan's"
    return [Finding(check="order", good=not odd, detail=detail)]


def precision(world: World) -> list[Finding]:
    """What can be sent, and multiplied, in which precision."""
    found: list[Finding] = []
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for dtype in PRECISIONS:
        name, eps = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps
        half = None if dtype == torch.float32 else dtype
        options = CommOptions(precision=half, timeout=20.0)
        comm = Communicator(_plan(world, "spngd"), options)
        bad = wrong(comm, "share_updates", world.device, torch.float32, 4 * eps)
        y = x.to(world.device, dtype)
        error = float(((y @ y.T).float().cpu() - x @ x.T).norm() / (x @ x.T).norm())
        said = comm.tell(bool(bad) or not error < 16 * eps)
        comm.close()
        ranks = [rank for rank, fault in enumerate(said) if fault]
        detail = f"sent and multiplied, error of a product {error:.1e}"
        if ranks:
            detail = f"wrong on ranks {ranks}"
        found.append(Finding(check=name, good=not ranks, detail=detail))
    return found


def links(world: World) -> list[Finding]:
    """Latency and bandwidth of a sum over all ranks."""
    comm = Communicator(_plan(world, "spngd"), CommOptions(timeout=20.0))
    small = torch.zeros(1, device=world.device)
    large = torch.zeros(LARGE, device=world.device)
    latency = timed(world, lambda: comm.agree(small).tolist())
    whole = timed(world, lambda: comm.agree(large).tolist(), 3)
    comm.close()
    moved = 2 * (world.size - 1) / world.size * 4 * LARGE
    rate = moved / max(whole - latency, 1e-9)
    detail = f"{1e6 * latency:.0f} microseconds, {rate / 1e9:.2f} GB/s a rank"
    return [Finding(check="links", good=True, detail=detail)]


def speed(world: World) -> list[Finding]:
    """Whether a rank computes much slower than the others."""
    comm = Communicator(_plan(world, "spngd"), CommOptions(timeout=60.0))
    x = torch.randn(192, 192, device=world.device)

    def work() -> None:
        for _ in range(5):
            torch.mm(x, x).sum().item()

    work()
    spent: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)
    said: list[float] = comm.tell(statistics.median(spent))
    comm.close()
    usual = statistics.median(said)
    slow = {rank: s / usual for rank, s in enumerate(said) if s > SLOW * usual}
    text = ", ".join(
        f"rank {r} is {ratio:.1f} times slower" for r, ratio in slow.items()
    )
    return [
        Finding(check="speed", good=not slow, detail=text or "ranks are equally fast")
    ]


def late(world: World) -> list[Finding]:
    """One rank does not come in time: the others say which."""
    last = world.size - 1
    comm = Communicator(_plan(world, "spngd"), CommOptions(timeout=PATIENCE))
    message = ""
    if world.rank == last:
        time.sleep(2 * PATIENCE)
    else:
        message = _error_of(comm)
    world.barrier()
    named = world.rank == last or f"rank {last} is stuck" in message
    return [_told(world, "timeout", named, f"rank {last} was late and was named")]


def died(world: World) -> list[Finding]:
    """One rank ends: the others say which. It does not come back."""
    last = world.size - 1
    comm = Communicator(_plan(world, "spngd"), CommOptions(timeout=30.0))
    if world.rank == last:
        os._exit(0)
    message = _error_of(comm)
    good = f"Rank {last} is gone" in message
    detail = f"rank {last} was ended and was named" if good else message or "no error"
    return [Finding(check="death", good=good, detail=detail.splitlines()[0])]


def _error_of(comm: Communicator) -> str:
    """What is said of a rank that does not take part."""
    try:
        comm.largest([0])()
    except CommError as error:
        return str(error)
    return ""


def _told(world: World, check: str, named: bool, detail: str) -> Finding:
    bad = world.any(not named)
    detail = "the rank that was late was not named" if bad else detail
    return Finding(check=check, good=not bad, detail=detail)
