"""The statistics of all blocks: averaged, inverted, shared and applied when due."""

import math
import time
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from natgrad.capture import POSITION_KINDS
from natgrad.comm import Communicator
from natgrad.config import Curvature
from natgrad.layers import Block
from natgrad.math import foreach
from natgrad.math.inverse import (
    Inverse,
    InverseError,
    damped_from_eigen,
    damped_inverses,
    eigendecompositions,
    pi_split,
    split_damping,
)
from natgrad.math.packing import pack, unpack
from natgrad.math.precondition import apply_eigen, apply_inverses
from natgrad.math.staleness import is_similar
from natgrad.plan import Plan
from natgrad.refresh import Timing
from natgrad.state import StatisticState
from natgrad.verdict import Verdict

MAX_FAILURES = 3
Findings = dict[str, Inverse | InverseError]


class Statistics:
    """One `StatisticState` for each statistic; every rank has all, owners their data.

    ``step`` counts from 0 and is set by the engine. ``seconds``, unless None, collects
    how long each owned inversion takes.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        config: Curvature,
        plan: Plan,
        comm: Communicator,
        like: Tensor,
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

    def due(self) -> list[StatisticState]:
        """The statistics to estimate in this step, in the blocks' order."""
        return [s for s in self.states.values() if s.timing.statistics_at <= self.step]

    def refresh(self, sums: dict[str, Tensor], verdict: Verdict) -> None:
        """Averages and inverses of what is due (SP-NGD, Algorithm 1).

        ``sums`` are the owned statistics' packed sums over ranks and micro-batches.
        """
        self._require_schedules()
        due = self.due()
        estimated = self._estimate(due, sums, verdict)
        # A due statistic without a usable estimate is tried again in the next step,
        # and its inverse waits with it.
        waiting = {s.spec.name for s in due} - {s.spec.name for s in estimated}
        inverted = [
            s
            for name, s in self.states.items()
            if s.timing.inverses_at <= self.step and s.estimated and name not in waiting
        ]
        findings = self._invert([s for s in inverted if self._owns(s)])
        self._share_findings(inverted, findings)
        self._share_inverses([s for s in inverted if s.failures == 0])
        self._advance(estimated, inverted)

    def _require_schedules(self) -> None:
        """Raise on a schedule's illegal value before anything has changed."""
        self.config.damping_at(self.step)
        self.config.refresh.after_statistic(self.step, Timing())
        self.config.refresh.after_inverse(self.step, Timing())

    def precondition(self, block: Block, gradient: Tensor) -> Tensor:
        """``(F + damping I)^-1`` times a gradient ``(s, m, n)``.

        The plain gradient while an inverse is missing.
        """
        states = [self.states[s.name] for s in block.spec.statistics]
        inverses = [s.inverse for s in states if s.inverse is not None]
        if not states or len(inverses) < len(states):
            return gradient
        if self.is_eigen(states[0]):
            right, left = inverses
            return apply_eigen(gradient, right, left, self.damping_of(block))
        left = inverses[1] if len(inverses) == 2 else None
        return apply_inverses(gradient, inverses[0], left)

    def damping_of(self, block: Block) -> float:
        """Lambda of a block at this step."""
        ratio = self.config.norm_damping_ratio if block.is_norm else 1.0
        return ratio * self.config.damping_at(self.step)

    def factor_damping(self, s: StatisticState) -> float:
        """What is added to one factor: all of lambda, or its part of the pi-split."""
        block = self.block[s.spec.block]
        damping = self.damping_of(block)
        if len(block.spec.statistics) == 1:
            return damping
        right, left = (self.states[x.name] for x in block.spec.statistics)
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
        return unflatten(s.average, s)

    def _owns(self, s: StatisticState) -> bool:
        return self.plan.owners[s.spec.name] == self.comm.rank

    def is_eigen(self, s: StatisticState) -> bool:
        """Whether its inverse is kept as an eigendecomposition."""
        two_sided = len(self.block[s.spec.block].spec.statistics) == 2
        return two_sided and self.config.damping_style == "eigen"

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
            scale = self._scale(s, verdict) / (s.spec.stack * s.spec.size)
            mean = verdict.traces[s.spec.name] * scale
            s.mean_eigenvalue = old * s.mean_eigenvalue + (1 - old) * mean
        mine = [s for s in usable if self._owns(s)]
        for s in mine:
            sums[s.spec.name].mul_(self._scale(s, verdict))
        self._average(mine, sums)
        for s in usable:
            s.estimated = True
        return usable

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
        began = time.perf_counter()
        eigen = [s for s in mine if self.is_eigen(s)]
        plain = [s for s in mine if not self.is_eigen(s)]
        bases = eigendecompositions([self.dense(s) for s in eigen])
        dampings = [self.factor_damping(s) for s in plain]
        inverses = damped_inverses([self.dense(s) for s in plain], dampings)
        findings: Findings = {}
        for s, x in zip(eigen, bases, strict=True):
            findings[s.spec.name] = x
        for s, x in zip(plain, inverses, strict=True):
            findings[s.spec.name] = x if isinstance(x, InverseError) else (x,)
        if self.seconds is not None:
            spent = time.perf_counter() - began
            self.seconds.update(dict.fromkeys(findings, spent))
        return findings

    def _share_findings(
        self, inverted: list[StatisticState], findings: Findings
    ) -> None:
        """Install owners' inverses; make interval and failures known to all ranks."""
        known: list[float] = []
        for s in inverted:
            found = findings.get(s.spec.name)
            if found is None:
                known += [0, 0]
            elif isinstance(found, InverseError):
                known += [s.timing.interval, s.failures + 1]
            else:
                known += [self._judge(s, found), 0]
                s.inverse = found
        if known and self.comm.world > 1:
            vector = self.like.new_tensor(known, dtype=torch.float64)
            known = self.comm.agree(vector).tolist()
        for s, interval, failures in zip(
            inverted, known[::2], known[1::2], strict=True
        ):
            s.failures = int(failures)
            s.timing.previous, s.timing.interval = s.timing.interval, int(interval)
        _report_failures([s for s in inverted if s.failures], self.comm.rank)

    def _judge(self, s: StatisticState, new: Inverse) -> int:
        """The next interval, from the damped inverse and the two before it."""
        tolerance = self.config.refresh.tolerance
        if tolerance is None:
            return s.timing.interval
        damped = new[0]
        if self.is_eigen(s):
            damped = damped_from_eigen(new[0], new[1], self.factor_damping(s))
        # unpacked again: packed, the Frobenius norm would miss half of the matrix
        similar = [is_similar(damped, unflatten(x, s), tolerance) for x in s.history]
        similar += [False] * (2 - len(similar))
        s.history = [flatten(damped), *s.history[:1]]
        return self.config.refresh.judge(similar[0], similar[1], s.timing)

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
            return (unflatten(flat, s),)
        stack, size = s.spec.stack, s.spec.size
        vectors, values = flat.split([flat.numel() - stack * size, stack * size])
        if not s.spec.diagonal:
            vectors = vectors.reshape(stack, size, size)
        return vectors, values.reshape(stack, size)

    def _advance(
        self, estimated: list[StatisticState], inverted: list[StatisticState]
    ) -> None:
        """Set when each statistic is due next; forget averages nobody will need."""
        refresh, fresh = self.config.refresh, {s.spec.name for s in estimated}
        for s in inverted:
            s.timing.inverted += 1
            s.timing.inverses_at = refresh.after_inverse(self.step, s.timing)
        for name, s in self.states.items():
            if name in fresh:
                s.timing.refreshed += 1
                s.timing.statistics_at = refresh.after_statistic(self.step, s.timing)
            else:
                s.timing.skipped += 1
        for s in inverted:
            replaced = s.timing.statistics_at <= s.timing.inverses_at
            if self.config.decay == 0.0 and replaced and not s.failures:
                s.average, s.estimated = None, False


def flatten(x: Tensor) -> Tensor:
    """A statistic ``(s, n, n)`` packed, a diagonal ``(s, n)`` as it is, in one dim."""
    return x.flatten() if x.dim() == 2 else pack(x)


def unflatten(flat: Tensor, s: StatisticState) -> Tensor:
    """The inverse of `flatten`."""
    if s.spec.diagonal:
        return flat.reshape(s.spec.stack, s.spec.size)
    return unpack(flat, s.spec.stack, s.spec.size)


def trace(x: Tensor) -> Tensor:
    """The sum of the diagonals of ``(s, n, n)``, or of a diagonal ``(s, n)``."""
    return x.sum() if x.dim() == 2 else x.diagonal(dim1=-2, dim2=-1).sum()


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
