"""How a step runs, and ranks gathered by what they do in it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from natgrad.plan import BlockSpec, Plan

Names = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a step runs.

    Attributes:
        batch: Examples per rank.
        bucket_bytes: Items are sent together up to this size.
        overlap: Whether exchanges run while gradients are computed.
        half: Exchanges sent in half precision.
        packed: Whether symmetric statistics go as triangles.
        stragglers, slowness: So many ranks compute so many times slower.
        jitter: Relative standard deviation of a rank's compute seconds; the expected
            slowest of k ranks is ``1 + jitter sqrt(2 ln k)`` times the mean.
        sampled: Whether statistics need a backward of their own (1mc).
    """

    batch: int = 32
    bucket_bytes: int = 25 * 2**20
    overlap: bool = True
    half: tuple[str, ...] = ()
    packed: bool = True
    stragglers: int = 0
    slowness: float = 1.0
    jitter: float = 0.0
    sampled: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"Invalid batch={self.batch}. Must be >= 1.")
        if self.slowness < 1:
            raise ValueError(f"Invalid slowness={self.slowness}. Must be >= 1.")
        if self.stragglers < 0 or self.jitter < 0:
            raise ValueError("Invalid stragglers or jitter. Must be >= 0.")

    def element_bytes(self, exchange: str) -> int:
        """Bytes an element in this exchange."""
        return 2 if exchange in self.half else 4


@dataclass(frozen=True, kw_only=True)
class Role:
    """Ranks that do the same: what they invert and precondition, and how fast."""

    owned: tuple[str, ...]
    columns: tuple[int, ...]
    speed: float
    ranks: int
    first: int


def roles_of(
    plan: Plan, conditions: Conditions
) -> tuple[list[Role], list[list[BlockSpec]]]:
    """Ranks gathered by what they do, and the blocks of each column of workers."""
    owned: dict[int, list[str]] = defaultdict(list)
    for name, rank in plan.owners.items():
        owned[rank].append(name)
    columns: dict[tuple[int, ...], list[BlockSpec]] = {}
    for block in plan.blocks:
        columns.setdefault(plan.workers[block.name], []).append(block)
    member: dict[int, list[int]] = defaultdict(list)
    for index, ranks in enumerate(columns):
        if len(ranks) < plan.world:
            for rank in ranks:
                member[rank].append(index)
    slow = _slow_ranks(plan.world, conditions.stragglers)
    keys: dict[tuple[Names, tuple[int, ...], float], list[int]] = {}
    busy = set(owned) | set(member) | slow
    for rank in sorted(busy):
        speed = conditions.slowness if rank in slow else 1.0
        key = tuple(owned.get(rank, ())), tuple(member.get(rank, ())), speed
        keys.setdefault(key, []).append(rank)
    roles = [
        Role(owned=o, columns=c, speed=s, ranks=len(ranks), first=ranks[0])
        for (o, c, s), ranks in keys.items()
    ]
    if idle := plan.world - len(busy):
        first = next(rank for rank in range(plan.world) if rank not in busy)
        none = Role(owned=(), columns=(), speed=1.0, ranks=idle, first=first)
        roles.append(none)
    return roles, list(columns.values())


def _slow_ranks(world: int, count: int) -> set[int]:
    """Stragglers spread evenly over the ranks, the same every time."""
    count = min(count, world)
    return {i * world // count for i in range(count)}


def label(role: Role) -> str:
    """A role as shown in a picture."""
    if role.ranks == 1:
        return f"rank {role.first}"
    return f"{role.ranks} ranks like {role.first}"
