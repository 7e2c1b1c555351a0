"""The statistics of all blocks: averaged, inverted, shared and applied when due."""

import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.capture.captured import POSITION_KINDS
from natgrad.diagnostics.timer import Meter
from natgrad.distributed.communicator import Communicator
from natgrad.engine.agreement import Verdict
from natgrad.factors.decompose import Findings, decompose, form_of
from natgrad.factors.pace import built_in_cost, first_refresh, paces
from natgrad.factors.refresh import Timing
from natgrad.factors.state import StatisticState
from natgrad.layers import Block
from natgrad.math import foreach
from natgrad.math.inverse import (
    Inverse,
    InverseError,
    damped_from_eigen,
    pi_split,
    split_damping,
)
from natgrad.math.packing import flatten, unflatten
from natgrad.math.spectrum import change_rate, packed_norm
from natgrad.math.staleness import is_similar
from natgrad.options import Curvature
from natgrad.plan import Plan

MAX_FAILURES = 3


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """Names of the statistics that a step estimated, and of those it inverted."""

    estimated: tuple[str, ...] = ()
    inverted: tuple[str, ...] = ()


class Statistics:
    """One `StatisticState` for each statistic; every rank has all, owners their data.

    ``step`` counts from 0 and is set by the engine. ``seconds``, unless None, collects
    how long each owned inversion takes; ``changes``, unless None, how much each owned
    average changed when it was last refreshed, for which averages are kept.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        config: Curvature,
        plan: Plan,
        comm: Communicator,
        like: Tensor,
        meter: Meter,
    ) -> None:
        self.config, self.plan, self.comm, self.like = config, plan, comm, like
        self.block = {b.name: b for b in blocks}
        self.states = {
            s.name: StatisticState(spec=s)
            for b in self.block.values()
            for s in b.spec.statistics
        }
        self.step = 0
        self.seconds: dict[str, float] | None = None
        self.meter = meter
        self.cost = built_in_cost(like.device, config)
        self.account = config.refresh.open_account(list(self.states), meter)
        self.changes: dict[str, Tensor] | None = None if self.account is None else {}
        self.last = Refreshed()

    def due(self) -> list[StatisticState]:
        """The statistics to estimate in this step, in the blocks' order."""
        return [s for s in self.states.values() if s.timing.statistics_at <= self.step]

    def facts(self) -> Tensor | None:
        """What a budget's account has to tell the other ranks in this step."""
        return None if self.account is None else self.account.facts(self.like)

    def refresh(self, sums: dict[str, Tensor], verdict: Verdict) -> None:
        """Averages and inverses of what is due (SP-NGD, Algorithm 1).

        ``sums`` are the owned statistics' packed sums over ranks and micro-batches.
        """
        self._require_schedules()
        if self.account is not None:
            self.account.learn(verdict.facts, self.comm.world)
        due = self.due()
        self._set_pace(verdict)
        estimated = self._estimate(due, sums, verdict)
        # A due statistic without a usable estimate is tried again in the next step,
        # and its inverse waits with it.
        waiting = {s.spec.name for s in due} - {s.spec.name for s in estimated}
        moments = {s.spec.name for s in estimated if s.spec.kind == "S"}
        inverted = [
            s
            for name, s in self.states.items()
            if s.estimated
            and name not in waiting
            # of an S there is nothing to invert: it is used as soon as it is known
            and (s.timing.inverses_at <= self.step or name in moments)
        ]
        self._announce(inverted)
        findings = self._invert([s for s in inverted if self._owns(s)])
        self._share_findings(inverted, findings)
        self._share_inverses([s for s in inverted if s.failures == 0])
        self._advance(estimated, inverted)

    def _require_schedules(self) -> None:
        """Raise on a schedule's illegal value before anything has changed."""
        self.config.damping_at(self.step)
        self.config.refresh.after_statistic(self.step, Timing())
        self.config.refresh.after_inverse(self.step, Timing())

    def _set_pace(self, verdict: Verdict) -> None:
        """When all are due: how often each may be inverted, if the policy asks."""
        share = self.config.refresh.share_of_step()
        if share is None or len(verdict.counts) < len(self.states):
            return
        found = paces(self.plan.blocks, verdict.counts, self.cost, share)
        for name, interval in found.items():
            self.states[name].timing.interval = interval

    def _announce(self, inverted: list[StatisticState]) -> None:
        """A line on stderr before inversions that take a while, the first time."""
        fresh = [s.spec for s in inverted if not s.timing.inverted]
        place = self.plan.owners, self.cost, self.like.device
        if self.comm.rank == 0 and fresh and (line := first_refresh(fresh, *place)):
            print(line, file=sys.stderr, flush=True)

    def damping_of(self, block: Block) -> float:
        """Lambda of a block at this step."""
        ratio = self.config.norm_damping_ratio if block.is_norm else 1.0
        return ratio * self.config.damping_at(self.step)

    def factor_damping(self, s: StatisticState) -> float:
        """What is added to one factor, in the chosen damping style.

        All of lambda, its part of the pi-split, or its multiple of the factor's mean
        eigenvalue (of lambda itself if that is zero: a layer that sees nothing).
        """
        block = self.block[s.spec.block]
        damping = self.damping_of(block)
        if self.config.damping_style == "relative":
            return damping * (s.mean_eigenvalue or 1.0)
        if len(block.spec.statistics) == 1:
            return damping
        right, left = (self.states[x.name] for x in block.spec.statistics[:2])
        pi = pi_split(right.mean_eigenvalue, left.mean_eigenvalue)
        return split_damping(damping, pi)[s is left]

    def _scale(self, s: StatisticState, verdict: Verdict) -> float:
        """From a sum to a mean. See Note [Scaling] in `capture`.

        The losses of k micro-batches that were divided by k scale G by 1 / k^2. Those
        of sampled labels are never divided.
        """
        config, k = self.config, verdict.forwards
        divided = config.accumulation == "mean" and config.fisher == "empirical"
        undone = k * k if divided and s.spec.kind not in POSITION_KINDS else 1
        return undone / verdict.counts[s.spec.name]

    def dense(self, s: StatisticState) -> Tensor:
        """The running average as ``(s, n, n)``, or ``(s, n)`` when diagonal."""
        assert s.average is not None
        return unflatten(s.average, s.spec.stack, s.spec.size, s.spec.diagonal)

    def _owns(self, s: StatisticState) -> bool:
        return self.plan.owners[s.spec.name] == self.comm.rank

    def is_eigen(self, s: StatisticState) -> bool:
        """Whether its inverse is kept as an eigendecomposition."""
        return form_of(s.spec, self.config) == "eigen"

    def is_root(self, s: StatisticState) -> bool:
        """Whether a root of its inverse is kept: an upper triangular W."""
        return form_of(s.spec, self.config) == "root"

    def _estimate(
        self, due: list[StatisticState], sums: dict[str, Tensor], verdict: Verdict
    ) -> list[StatisticState]:
        """Fold the estimates into the averages (Pauloski et al., eq. 16-17)."""
        usable: list[StatisticState] = []
        for s in due:
            if not verdict.usable(s.spec.name):
                s.quarantined += not math.isfinite(verdict.traces[s.spec.name])
                continue
            usable.append(s)
            # The first estimate starts the average.
            old = self.config.decay if s.estimated else 0.0
            scale = self._scale(s, verdict) / s.spec.eigenvalues
            mean = verdict.traces[s.spec.name] * scale
            s.mean_eigenvalue = old * s.mean_eigenvalue + (1 - old) * mean
        mine = [s for s in usable if self._owns(s)]
        for s in mine:
            sums[s.spec.name].mul_(self._scale(s, verdict))
        if self.changes is not None:
            self._note_changes(mine, sums, self.changes)
        self._average(mine, sums)
        for s in usable:
            s.estimated = True
        return usable

    def _note_changes(
        self,
        mine: list[StatisticState],
        sums: dict[str, Tensor],
        changes: dict[str, Tensor],
    ) -> None:
        """How much each average is about to change (Osawa et al. 2019, eq. 19)."""
        for s in mine:
            if s.average is not None:
                old, weight = s.average, 1 - self.config.decay
                moved = weight * _norm(sums[s.spec.name] - old, s)
                changes[s.spec.name] = rate = change_rate(moved, _norm(old, s))
                if self.account is not None:
                    self.account.note_change(s.spec.name, rate)

    def _average(self, mine: list[StatisticState], sums: dict[str, Tensor]) -> None:
        decay = self.config.decay
        running = [s for s in mine if s.estimated and decay and s.average is not None]
        averages = [s.average for s in running if s.average is not None]
        if averages:
            foreach.scale_(averages, decay)
            foreach.add_(averages, [sums[s.spec.name] for s in running], 1 - decay)
        for s in mine:
            if s.average is None or not (s.estimated and decay):
                s.average = sums[s.spec.name]

    def _invert(self, mine: list[StatisticState]) -> Findings:
        """New inverses of owned statistics, or why there is none."""
        if self.seconds is not None and len(mine) > 1:
            parts = [self._invert([s]) for s in mine]  # each is timed on its own
            return {name: found for part in parts for name, found in part.items()}
        began, model = time.perf_counter(), self.cost
        with self.meter("invert", {s.spec.name: model.invert(s.spec) for s in mine}):
            findings = self._decompose(mine)
        if self.seconds is not None:
            spent = time.perf_counter() - began
            self.seconds.update(dict.fromkeys(findings, spent))
        return findings

    def _decompose(self, mine: list[StatisticState]) -> Findings:
        averages = [self.dense(s) for s in mine]
        dampings = [self.factor_damping(s) for s in mine]
        return decompose(mine, self.config, averages=averages, dampings=dampings)

    def _share_findings(
        self, inverted: list[StatisticState], findings: Findings
    ) -> None:
        """Install owners' inverses; make interval and failures known to all ranks."""
        known: list[float] = []
        intervals = self._judge(findings)
        for s in inverted:
            found = findings.get(s.spec.name)
            if found is None:
                known += [0, 0]
            elif isinstance(found, InverseError):
                known += [s.timing.interval, s.failures + 1]
            else:
                known += [intervals[s.spec.name], 0]
                # LAPACK leaves columns one after another; others receive rows, and
                # a product would be rounded differently
                s.inverse = tuple(x.contiguous() for x in found)
        if known and self.comm.world > 1:
            vector = self.like.new_tensor(known, dtype=torch.float64)
            known = self.comm.agree(vector).tolist()
        for s, interval, failures in zip(
            inverted, known[::2], known[1::2], strict=True
        ):
            s.failures = int(failures)
            s.timing.previous, s.timing.interval = s.timing.interval, int(interval)
        _report_failures([s for s in inverted if s.failures], self.comm.rank)

    def _judge(self, findings: Findings) -> dict[str, int]:
        """The next interval of each new inverse, from it and the two before it."""
        refresh, tolerance = self.config.refresh, self.config.refresh.tolerance
        found = {n: x for n, x in findings.items() if not isinstance(x, InverseError)}
        states = [self.states[name] for name in found]
        if tolerance is None:
            return {s.spec.name: s.timing.interval for s in states}
        # all are compared before one is read: that is one synchronisation
        compared = [self._compare(s, found[s.spec.name], tolerance) for s in states]
        flat = [x for similar in compared for x in similar]
        known: Iterator[bool] = iter(torch.stack(flat).tolist() if flat else ())
        intervals: dict[str, int] = {}
        for s, similar in zip(states, compared, strict=True):
            last, before = [*(next(known) for _ in similar), False, False][:2]
            intervals[s.spec.name] = refresh.judge(last, before, s.timing)
        return intervals

    def _compare(self, s: StatisticState, new: Inverse, limit: float) -> list[Tensor]:
        """Whether a damped inverse is similar to the last and to the one before."""
        damped = new[0]
        if self.is_eigen(s):
            damped = damped_from_eigen(new[0], new[1], self.factor_damping(s))
        # unpacked again: packed, the Frobenius norm would miss half of the matrix
        earlier = (self._unflatten_inverse(x, s) for x in s.history)
        similar = [is_similar(damped, x, limit) for x in earlier]
        s.history = [flatten(damped), *s.history[:1]]
        return similar

    def _share_inverses(self, states: list[StatisticState]) -> None:
        if self.comm.world == 1 or not states:
            return
        names = [s.spec.name for s in states]
        flight = self.comm.begin(
            "share_inverses", names, self.like.dtype, self.like.device
        )
        for s in states:
            if self._owns(s) and s.inverse is not None:
                flight.put(s.spec.name, self._pack_inverse(s, s.inverse))
        # in half precision an owner gets its own back, rounded as others see it
        for name, flat in flight.finish().items():
            s = self.states[name]
            s.inverse = self._unpack_inverse(s, flat)

    def _pack_inverse(self, s: StatisticState, inverse: Inverse) -> Tensor:
        if self.is_eigen(s):
            return torch.cat([x.flatten() for x in inverse])
        return flatten(inverse[0])

    def _unpack_inverse(self, s: StatisticState, flat: Tensor) -> Inverse:
        if not self.is_eigen(s):
            return (self._unflatten_inverse(flat, s),)
        stack, size = s.spec.stack, s.spec.size
        vectors, values = flat.split([flat.numel() - stack * size, stack * size])
        if not s.spec.diagonal:
            vectors = vectors.reshape(stack, size, size)
        return vectors, values.reshape(stack, size)

    def _unflatten_inverse(self, flat: Tensor, s: StatisticState) -> Tensor:
        """A dense inverse or root; of the root only the upper triangle was packed."""
        dense = unflatten(flat, s.spec.stack, s.spec.size, s.spec.diagonal)
        return dense.triu_() if self.is_root(s) and dense.dim() == 3 else dense

    def _advance(
        self, estimated: list[StatisticState], inverted: list[StatisticState]
    ) -> None:
        """Set when each statistic is due next; forget averages nobody will need."""
        refresh, fresh = self.config.refresh, {s.spec.name for s in estimated}
        names = tuple(s.spec.name for s in inverted)
        self.last = Refreshed(estimated=tuple(sorted(fresh)), inverted=names)
        for s in inverted:
            s.timing.inverted += 1
            s.timing.inverted_at = self.step
            s.timing.inverses_at = refresh.after_inverse(self.step, s.timing)
        for name, s in self.states.items():
            if name in fresh:
                s.timing.refreshed += 1
                s.timing.refreshed_at = self.step
                s.timing.statistics_at = refresh.after_statistic(self.step, s.timing)
            else:
                s.timing.skipped += 1
        for s in inverted:
            replaced = s.timing.statistics_at <= s.timing.inverses_at
            if self.config.decay == 0.0 and replaced and not s.failures:
                s.average = s.average if self.changes is not None else None
                s.estimated = False
        self._allot()

    def _allot(self) -> None:
        """Under a budget: what is due next. What waits to be tried again stays due."""
        if self.account is None:
            return
        timings = {n: s.timing for n, s in self.states.items()}
        chosen = self.account.decide(self.step, timings, self.plan.owners)
        for name, t in timings.items():
            if t.refreshed_at == self.step or t.statistics_at > self.step:
                t.statistics_at = t.inverses_at = self.step + (2 - (name in chosen))


def _norm(flat: Tensor, s: StatisticState) -> Tensor:
    """The Frobenius norm of a packed statistic."""
    if s.spec.diagonal:
        return torch.linalg.vector_norm(flat)
    return packed_norm(flat, s.spec.stack, s.spec.size)


def _report_failures(failed: list[StatisticState], rank: int) -> None:
    """Warn of inverses that were kept; raise, on every rank, after three in a row."""
    for s in failed:
        message = (
            f"The inverse of {s.spec.name} (size {s.spec.size}) failed, with jitter "
            f"and in float64 too, {s.failures} time(s) in a row"
        )
        if s.failures >= MAX_FAILURES:
            raise InverseError(f"{message}. Raise the damping, or skip this layer.")
        if rank == 0:
            instead = "plain gradient" if s.inverse is None else "last good one"
            warnings.warn(f"{message}. The {instead} is used.", stacklevel=6)
