"""Which ranks share a host, for reductions within hosts and then between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from natgrad.plan.strategies import Ranks


def nodes_of(hosts: Sequence[str], wanted: bool | str) -> tuple[Ranks, ...]:
    """The ranks of each host if reductions should go by host, else nothing.

    They do if ``wanted`` ("auto" or True) and there are several hosts with the same
    number of ranks, more than one. True with uneven hosts is an error.
    """
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        by_host[host].append(rank)
    sizes = {host: len(ranks) for host, ranks in by_host.items()}
    even = len(set(sizes.values())) == 1
    if wanted is True and not even:
        raise ValueError(
            f"Invalid hierarchical=True with ranks by host {sizes}. Must be the same."
        )
    useful = even and 1 < len(by_host) < len(hosts)
    return tuple(map(tuple, by_host.values())) if wanted and useful else ()


def rails_of(nodes: Sequence[Ranks]) -> list[Ranks]:
    """For each place in a node, the ranks that have it, one per node."""
    return [tuple(sorted(ranks)) for ranks in zip(*nodes, strict=True)]
