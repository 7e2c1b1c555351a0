"""Running averages of the statistics of all blocks."""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.capture.forwards import POSITION_KINDS
from natgrad.diagnostics.timer import Meter
from natgrad.distributed.communicator import Communicator
from natgrad.factors.refresh import Refresh
from natgrad.factors.state import StatisticState
from natgrad.layers import Block
from natgrad.math import foreach
from natgrad.math.inverse import pi_split, split_damping
from natgrad.math.packing import flatten, traces, unflatten
from natgrad.math.precision import rescaled
from natgrad.math.spectrum import change_rate, packed_norm
from natgrad.math.statistics import own_moment
from natgrad.plan import Plan, StatisticSpec
from natgrad.plan.pace import built_in_cost
from natgrad.requiring import require_number
from natgrad.rules.parts import Damping, Parts
from natgrad.rules.preconditioner import TOGETHER_UP_TO
from natgrad.rules.rule import Rule

if TYPE_CHECKING:
    from natgrad.engine.agreement import Verdict
    from natgrad.options import Options


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """Names of the statistics that a step estimated, and of those it inverted."""

    estimated: tuple[str, ...] = ()
    inverted: tuple[str, ...] = ()


class Averages:
    """One `StatisticState` for each statistic; every rank has all, owners their data.

    ``step`` counts from 0 and is set by the engine. ``seconds``, unless None, collects
    how long each owned inversion takes; ``changes``, unless None, how much each owned
    average changed when it was last refreshed, for which averages are kept.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        options: "Options",
        parts: Mapping[str, Parts],
        *,
        plan: Plan,
        comm: Communicator,
        like: Tensor,
        meter: Meter,
    ) -> None:
        self.options, self.plan, self.comm, self.like = options, plan, comm, like
        self.block = {b.name: b for b in blocks}
        self.parts, self._distinct = parts, list(dict.fromkeys(parts.values()))
        self.states = {
            s.name: StatisticState(spec=s)
            for b in self.block.values()
            for s in b.spec.statistics
        }
        self.step = 0
        self.seconds: dict[str, float] | None = None
        self.meter = meter
        self.cost = built_in_cost(like.device, plan.inverse, options.rule.name)
        self.account = options.refresh.open_account(list(self.states), meter)
        self.changes: dict[str, Tensor] | None = None if self.account is None else {}
        self.last = Refreshed()

    def due(self) -> list[StatisticState]:
        """The statistics to estimate in this step, in the blocks' order."""
        return [s for s in self.states.values() if s.timing.statistics_at <= self.step]

    def to_capture(self) -> list[str]:
        """Names of the due statistics that forwards and backwards are to give."""
        return [s.spec.name for s in self.due() if not s.spec.is_local]

    def counted(self) -> dict[str, int]:
        """Matrices of the due statistics that count the inputs of each, by name."""
        due = [s.spec for s in self.due() if s.spec.counted]
        return {s.name: s.stack // s.parts for s in due}

    def facts(self) -> Tensor | None:
        """What a budget's account has to tell the other ranks in this step."""
        return None if self.account is None else self.account.facts(self.like)

    def damping_of(self, block: Block) -> float:
        """Lambda of a block at this step."""
        ratio = self.options.norm_damping_ratio if block.is_norm else 1.0
        return ratio * damping_at(self.parts[block.name].damping, self.step)

    def factor_damping(self, s: StatisticState) -> float:
        """What is added to one factor, in the chosen damping style.

        All of lambda, its root, its part of the pi-split, or its multiple of the
        factor's mean eigenvalue (lambda itself if that is zero: a layer that sees
        nothing). A factor that is alone has all of lambda.
        """
        block = self.block[s.spec.block]
        damping = self.damping_of(block)
        if block.rule.style == "relative":
            return damping * (s.mean_eigenvalue or 1.0)
        if len(block.spec.statistics) == 1 or block.rule.style == "whole":
            return damping
        if block.rule.style == "root":
            return math.sqrt(damping)
        right, left = (self.states[x.name] for x in block.spec.statistics[:2])
        pi = pi_split(right.mean_eigenvalue, left.mean_eigenvalue)
        return split_damping(damping, pi)[s is left]

    def _scale(self, s: StatisticState, verdict: "Verdict") -> float:
        """From a sum to a mean. See Note [Scaling] in `capture`.

        The losses of k micro-batches that were divided by k scale G by 1 / k^2. Those
        of sampled labels are never divided.
        """
        options, k = self.options, verdict.forwards
        divided = options.accumulation == "mean" and options.fisher == "empirical"
        undone = k * k if divided and s.spec.kind not in POSITION_KINDS else 1
        return undone / verdict.counts[s.spec.name]

    def dense(self, s: StatisticState) -> Tensor:
        """The running average as ``(s, n, n)``, or ``(s, n)`` when diagonal."""
        assert s.average is not None
        return unflatten(s.average, s.spec.stack, s.spec.size, s.spec.diagonal)

    def owns(self, s: StatisticState) -> bool:
        """Whether this rank keeps and inverts it."""
        return self.plan.owners[s.spec.name] == self.comm.rank

    def _rule(self, s: StatisticState) -> Rule:
        return self.block[s.spec.block].rule

    def _refresh(self, s: StatisticState) -> Refresh:
        return self.parts[s.spec.block].refresh

    def form(self, s: StatisticState) -> str:
        """What is kept of it; see `natgrad.factors.statistics`."""
        if s.spec.kind == "S":
            return "moment"
        return self._rule(s).form if s.spec.is_factor else "inverse"

    def is_eigen(self, s: StatisticState) -> bool:
        """Whether its inverse is kept as an eigendecomposition."""
        return self.form(s) == "eigen"

    def _estimate(
        self, due: list[StatisticState], sums: dict[str, Tensor], verdict: "Verdict"
    ) -> list[StatisticState]:
        """Fold the estimates into the averages (Pauloski et al., eq. 16-17)."""
        usable: list[StatisticState] = []
        for s in due:
            if not verdict.usable(s.spec.name):
                s.quarantined += not math.isfinite(verdict.traces[s.spec.name])
                continue
            usable.append(s)
            old, new = self._weights(s)
            scale = self._scale(s, verdict) / s.spec.eigenvalues
            mean = verdict.traces[s.spec.name] * scale
            s.mean_eigenvalue = old * s.mean_eigenvalue + new * mean
        mine = [s for s in usable if self.owns(s)]
        for s in mine:
            sums[s.spec.name].mul_(self._scale(s, verdict))
            if s.spec.counted:
                self._count_members(s, sums[s.spec.name], verdict)
        if self.changes is not None:
            self._note_changes(mine, sums, self.changes)
        self._average(mine, sums)
        for s in usable:
            s.estimated = True
        return usable

    def _count_members(
        self, s: StatisticState, flat: Tensor, verdict: "Verdict"
    ) -> None:
        """Let each matrix have its own average. See Note [Inputs of each matrix]."""
        name, each = s.spec.name, flat.view(len(verdict.members[s.spec.name]), -1)
        inputs = flat.new_tensor(verdict.members[name]).unsqueeze(1)
        if s.spec.kind in POSITION_KINDS:
            each.mul_(verdict.counts[name] / inputs.clamp_min(1))
        if s.average is None:
            return
        old = s.average.view_as(each)
        # what is averaged with weights ends as what it is, or as the first estimate is
        begins = old.any(1, keepdim=True).logical_not_()
        each.div_(torch.where(begins, self._weights(s)[1], 1.0))
        each.copy_(torch.where(inputs > 0, each, old))

    def _estimate_local(
        self, due: list[StatisticState], gradients: Mapping[str, Tensor]
    ) -> list[StatisticState]:
        """Those of the weight's own gradient, on their owners, who are workers."""
        mine = [s for s in due if self.owns(s)]
        sums, found = dict[str, Tensor](), list[Tensor]()
        for specs in self._alike(mine, gradients):
            moment = self._own(specs, gradients)
            found += traces(moment, len(specs))
            packed = flatten(moment).split(specs[0].packed)
            sums |= {spec.name: x for spec, x in zip(specs, packed, strict=True)}
        # The split of the damping needs the trace of the other side too, whose owner
        # may be another worker: both are the squared norm of the gradient.
        theirs = [s for s in due if not self.owns(s) and s.spec.block in gradients]
        found += [gradients[s.spec.block].square().sum() for s in theirs]
        names = [*sums, *(s.spec.name for s in theirs)]
        known: list[float] = torch.stack(found).tolist() if found else []
        for s, total in zip((self.states[n] for n in names), known, strict=True):
            mean = total / s.spec.eigenvalues
            old, new = self._weights(s)
            s.mean_eigenvalue = old * s.mean_eigenvalue + new * mean
        if self.changes is not None:
            self._note_changes(mine, sums, self.changes)
        self._average(mine, sums)
        for s in due:
            s.estimated = True
        return due

    def _alike(
        self, states: list[StatisticState], gradients: Mapping[str, Tensor]
    ) -> list[list[StatisticSpec]]:
        """Those of small gradients of equal shape together, others alone."""
        groups: dict[Hashable, list[StatisticSpec]] = {}
        for spec in (s.spec for s in states):
            g = gradients[spec.block]
            # rounded to half precision, each has a scale of its own
            alone = self.options.factor_precision or g.numel() > TOGETHER_UP_TO
            alike = g.shape, g.dtype, spec.side, spec.parts, spec.size, spec.diagonal
            groups.setdefault(spec.name if alone else alike, []).append(spec)
        return [*groups.values()]

    def _own(
        self, specs: list[StatisticSpec], gradients: Mapping[str, Tensor]
    ) -> Tensor:
        """Statistics of some weights' own gradients, one after another."""
        each = [gradients[spec.block] for spec in specs]
        whole = each[0] if len(each) == 1 else torch.cat(each)
        precision, spec = self.options.factor_precision, specs[0]
        gradient, times = rescaled(whole, precision)
        moment = own_moment(
            gradient,
            spec.side,
            parts=spec.parts,
            size=spec.size,
            diagonal=spec.diagonal,
        )
        return moment.mul_(times).to(self.like) if precision else moment

    def _weights(self, s: StatisticState) -> tuple[float, float]:
        """Of the old value and the new estimate; the first estimate starts it.

        The weights of single gradients fall with their age from the first on: one
        gradient is a poor start for a running average, the activations of a batch are
        not. With a decay of 1 nothing is forgotten: a sum, as Shampoo has it.
        """
        old = self.options.factor_decay if s.estimated else 0.0
        if s.spec.is_local and 0.0 < old < 1.0:
            steps = s.timing.refreshed
            old *= (1 - old**steps) / (1 - old ** (steps + 1))
        return old, (1 - old if old < 1 else 1.0)

    def _note_changes(
        self,
        mine: list[StatisticState],
        sums: dict[str, Tensor],
        changes: dict[str, Tensor],
    ) -> None:
        """How much each average is about to change (Osawa et al. 2019, eq. 19)."""
        for s in mine:
            if s.average is not None:
                old, (kept, weight) = s.average, self._weights(s)
                new = sums[s.spec.name]
                moved = weight * _norm(new if kept == 1 else new - old, s)
                changes[s.spec.name] = rate = change_rate(moved, _norm(old, s))
                if self.account is not None:
                    self.account.note_change(s.spec.name, rate)

    def _average(self, mine: list[StatisticState], sums: dict[str, Tensor]) -> None:
        running: dict[tuple[float, float], list[StatisticState]] = {}
        for s in mine:
            weights = self._weights(s)
            if s.average is None or not weights[0]:
                s.average = sums[s.spec.name]
            else:
                running.setdefault(weights, []).append(s)
        for (old, new), states in running.items():
            averages = [s.average for s in states if s.average is not None]
            foreach.scale_(averages, old)
            foreach.add_(averages, [sums[s.spec.name] for s in states], new)


def _norm(flat: Tensor, s: StatisticState) -> Tensor:
    """The Frobenius norm of a packed statistic."""
    if s.spec.diagonal:
        return torch.linalg.vector_norm(flat)
    return packed_norm(flat, s.spec.stack, s.spec.size)


def damping_at(damping: Damping, step: int) -> float:
    """Lambda at a step, checked when it comes from a schedule."""
    if not callable(damping):
        return float(damping)
    value = float(damping(step))
    require_number(f"damping({step})", value, "a finite number >= 0", low=0.0)
    return value
