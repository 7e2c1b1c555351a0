"""What all ranks know about a step, equal on each of them.

Note [One decision on all ranks]
Ranks must agree on what is refreshed, skipped and quarantined, or they would wait for
each other forever. Everything such a decision needs goes through `Communicator.agree`
(a small sum over ranks): whether gradients are finite, which blocks have one, each due
statistic's trace and count, and what owners found when they inverted. The traces also
give every rank the mean eigenvalues for the pi-split, whoever owns the factors. Digests
of what must be the same on all ranks come along: Note [Equal on all ranks] in
`replicas`. Reading the verdict is the step's one synchronisation.

Note [Agreed overflow]
A scaler looks at the gradients of its own rank and skips the step there. Where the
optimizer itself reduces gradients, the other ranks would wait for that one forever. So
the optimizer tells the scaler that it handles overflows (as torch's fused optimizers
do): the scaler then always steps, and says what it found. That goes into the step's
agreement, all ranks skip or none does, and each rank's scaler is told of the overflow,
so that all loss scales stay the same. An optimizer that does so tells its engine
(``agrees_on_overflow``), which refuses a scaler otherwise.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.capture.forwards import Captured
from natgrad.distributed.communicator import Communicator
from natgrad.layers import Block
from natgrad.math import foreach
from natgrad.math.shards import local


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Sums over ranks, read once.

    Attributes:
        finite: whether every gradient on every rank is.
        gradients: on how many ranks each block has a gradient, by name.
        traces, counts: of each due statistic's sum, by name.
        seen: names of the due statistics that some rank has a sum of.
        members: how many inputs each matrix had, of due statistics that count them.
        forwards: micro-batches a rank, of the ranks that captured any.
        same: for each digest, whether it is the same on all ranks.
        facts: the sums of whatever else the ranks had to tell.
    """

    finite: bool
    gradients: dict[str, int]
    traces: dict[str, float]
    counts: dict[str, float]
    seen: frozenset[str]
    members: dict[str, list[float]]
    forwards: int
    same: tuple[bool, ...] = ()
    facts: tuple[float, ...] = ()

    @property
    def present(self) -> frozenset[str]:
        """Names of the blocks that have a gradient on some rank."""
        return frozenset(name for name, ranks in self.gradients.items() if ranks)

    def among(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of blocks that have a gradient on some rank: the others are zeros."""
        present = self.present
        return {name: g for name, g in gradients.items() if name in present}

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
    captured: Captured,
    digests: Sequence[int] = (),
    facts: Tensor | None = None,
    counted: Mapping[str, int] | None = None,
) -> Verdict:
    """Sum what each rank knows; ``norm`` is finite just when all its gradients are.

    ``blocks`` says which have a gradient here, ``captured`` what else is known of the
    statistics that have ``traces``; ``digests`` are compared, ``facts`` (float64) only
    summed. ``counted`` has the matrices of those statistics that count inputs of each.
    """
    counts = [captured.count(name) for name in traces]
    seen = [name in captured.calls for name in traces]
    forwards = captured.forwards
    pairs = [number for d in digests for number in (d, d * d)]
    known = [*pairs, *blocks.values(), *counts, *seen, forwards, forwards > 0]
    host = norm.new_tensor(known, dtype=torch.float64)
    device = torch.stack([norm, *traces.values()]).double()
    many = counted or {}
    zeros = {name: device.new_zeros(stack) for name, stack in many.items()}
    members = [captured.members.get(n, zero).to(device) for n, zero in zeros.items()]
    own = torch.cat((device, host, *members, *(() if facts is None else (facts,))))
    total: list[float] = (own if comm.world == 1 else comm.agree(own)).tolist()
    told = iter(total)

    def next_of(names: Iterable[Any]) -> list[float]:
        return [next(told) for _ in names]

    (finite,) = next_of("1")
    sums, pairs, held = next_of(traces), next_of(pairs), next_of(blocks)
    terms, had, (micro, ranks) = next_of(traces), next_of(traces), next_of("12")
    return Verdict(
        finite=math.isfinite(finite),
        gradients={name: round(n) for name, n in zip(blocks, held, strict=True)},
        traces=dict(zip(traces, sums, strict=True)),
        counts=dict(zip(traces, terms, strict=True)),
        seen=frozenset(name for name, n in zip(traces, had, strict=True) if n),
        members={name: next_of(range(stack)) for name, stack in many.items()},
        forwards=round(micro / max(ranks, 1.0)),
        same=tuple(_are_equal(pairs, comm.world)),
        facts=tuple(told),
    )


def _are_equal(pairs: Sequence[float], world: int) -> Iterator[bool]:
    """Of sums of whole numbers and of their squares: whether all numbers were equal."""
    for total, squares in zip(pairs[::2], pairs[1::2], strict=True):
        yield world * int(squares) == int(total) ** 2


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
        p.grad.coalesce().values() if p.grad.is_sparse else local(p.grad)
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


def require_known(model: nn.Module, blocks: list[Block]) -> None:
    """Raise if a parameter has a gradient that a step would not use."""
    used = {id(p) for b in blocks if b.is_trained for p in b.parameters}
    # in each step: names are looked for only where there is something to say
    modules, seen = [model], set[int]()
    while modules:
        module = modules.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        modules += [m for m in module._modules.values() if m is not None]  # pyright: ignore[reportPrivateUsage]
        for p in module._parameters.values():  # pyright: ignore[reportPrivateUsage]
            if p is None or id(p) in used or p.grad is None or not p.requires_grad:
                continue
            name = next(name for name, x in model.named_parameters() if x is p)
            raise RuntimeError(
                f"{name} was added, frozen or unfrozen after registration. Must be "
                "done before KFAC or SPNGD is made."
            )


class Overflow:
    """What a scaler found in this rank's gradients, and what it is told.

    Args:
        optimizer: the one that `GradScaler.step` is called with.
        scaler: the scaler, if there is one.
        own: whether gradients are the rank's own when it looks. Where they are the
            same on all ranks, it is left to do as it does.
    """

    def __init__(
        self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None, *, own: bool
    ) -> None:
        self._optimizer = optimizer
        self._scaler = scaler if own else None
        if self._scaler is not None:
            # the name of the attribute that GradScaler.step asks for
            setattr(optimizer, "_step_supports_amp_scaling", True)  # noqa: B010

    def unscaled(self) -> Tensor | None:
        """Divide gradients by the loss scale, unless `GradScaler.unscale_` has.

        Returns a tensor that is > 0 if the scaler found an overflow; None if the step
        is not the scaler's.
        """
        if self._scaler is None:
            return None
        scale: Tensor | None = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            for group in self._optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(scale.to(p.grad.device))
        found = getattr(self._optimizer, "found_inf", None)
        # without any gradient here it is the number 0
        return None if found is None else torch.as_tensor(found)

    def told(self, found: Tensor | None) -> bool:
        """Have this rank's scaler lower its scale, whichever rank found the overflow.

        ``found`` is what `unscaled` returned. Returns whether a scaler was told.
        """
        if self._scaler is None or found is None:
            return False
        flags = self._scaler._found_inf_per_device(  # pyright: ignore[reportPrivateUsage]
            self._optimizer
        )
        for flag in flags.values():
            flag.fill_(1.0)
        return True
