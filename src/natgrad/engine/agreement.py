"""What all ranks know alike of a step.

Note [One decision on all ranks]
Ranks must agree on what is refreshed, skipped and quarantined, or they would wait for
each other for ever. Everything such a decision needs goes through `Communicator.agree`
(a small sum over ranks): whether gradients are finite, which blocks have one, each due
statistic's trace and count, and what owners found when they inverted. The traces also
give every rank the mean eigenvalues for the pi-split, whoever owns the factors.
Reading the verdict is the step's one synchronisation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.distributed.communicator import Communicator
from natgrad.layers import Block
from natgrad.math import foreach


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Sums over ranks, read once.

    Attributes:
        finite: whether every gradient on every rank is.
        present: names of the blocks that have a gradient on some rank.
        traces, counts: of each due statistic's sum, by name.
        seen: names of the due statistics that some rank has a sum of.
        forwards: micro-batches a rank, of the ranks that captured any.
        facts: the sums of whatever else the ranks had to tell.
    """

    finite: bool
    present: frozenset[str]
    traces: dict[str, float]
    counts: dict[str, float]
    seen: frozenset[str]
    forwards: int
    facts: tuple[float, ...] = ()

    def among(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of blocks that have a gradient on some rank: the others are zeros."""
        return {name: g for name, g in gradients.items() if name in self.present}

    def usable(self, name: str) -> bool:
        """Whether a due statistic was seen at all, and is finite."""
        known = name in self.seen and self.counts[name] > 0
        return known and math.isfinite(self.traces[name])


def reach_verdict(
    comm: Communicator,
    *,
    norm: Tensor,
    blocks: dict[str, bool],
    traces: dict[str, Tensor],
    counts: Sequence[float],
    seen: Sequence[bool],
    forwards: int,
    facts: Tensor | None = None,
) -> Verdict:
    """Sum what each rank knows; ``norm`` is finite just when all its gradients are.

    ``blocks`` says which have a gradient here; ``counts`` and ``seen`` go with
    ``traces``; ``forwards`` are the micro-batches that were captured here; ``facts``
    (float64) are only summed.
    """
    known = [*blocks.values(), *counts, *seen, forwards, forwards > 0]
    host = norm.new_tensor(known, dtype=torch.float64)
    device = torch.stack([norm, *traces.values()]).double()
    parts = (device, host) if facts is None else (device, host, facts)
    total: list[float] = comm.agree(torch.cat(parts)).tolist()
    told = len(device) + len(host)
    total, more = total[:told], total[told:]
    first, second = 1 + len(traces), 1 + len(traces) + len(blocks)
    third = second + len(traces)
    *_, forwards_sum, ranks = total
    present = zip(blocks, total[first:second], strict=True)
    return Verdict(
        finite=math.isfinite(total[0]),
        present=frozenset(name for name, n in present if n > 0),
        traces=dict(zip(traces, total[1:first], strict=True)),
        counts=dict(zip(traces, total[second:third], strict=True)),
        seen=frozenset(n for n, s in zip(traces, total[third:-2], strict=True) if s),
        forwards=round(forwards_sum / max(ranks, 1.0)),
        facts=tuple(more),
    )


def gradient_norm(
    blocks: Sequence[Block],
    means: list[Tensor],
    like: Tensor,
    overflow: Tensor | None = None,
) -> Tensor:
    """Finite just when every gradient on this rank is, and every mean over ranks.

    Infinite where ``overflow`` > 0: what a scaler found; see Note [Agreed overflow].
    """
    params = [p for b in blocks for p in b.parameters]
    grads = [
        p.grad.coalesce().values() if p.grad.is_sparse else p.grad
        for p in params
        if p.grad is not None
    ]
    grads += means
    if not grads:
        return like.new_zeros(())
    norm = torch.stack([x.to(like.dtype) for x in foreach.norms(grads)]).sum()
    if overflow is None:
        return norm
    return norm.masked_fill(overflow.to(norm.device) > 0, math.inf)
