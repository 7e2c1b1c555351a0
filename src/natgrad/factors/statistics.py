"""The statistics of all blocks: averaged, inverted and shared when due.

A prepared factor is a tuple of tensors: ``(X^-1,)`` (form ``"inverse"``), ``(W,)`` with
``W W^T = X^-1`` upper triangular (``"root"``), ``(X^-power,)`` (``"power"``), or the
eigenvectors and eigenvalues ``(Q, v)`` (``"eigen"``); of damped X, but for ``"eigen"``.
``"moment"`` is the statistic itself. Between steps rules may keep them packed.
"""

import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.factors.averages import Averages, Refreshed, damping_at
from natgrad.factors.refresh import Timing
from natgrad.factors.state import StatisticState, pack, triangle, unpack
from natgrad.math.inverse import (
    Inverse,
    InverseError,
    damped_from_eigen,
    damped_inverses,
    damped_powers,
    damped_roots,
    eigendecompositions,
)
from natgrad.math.packing import flatten, unflatten
from natgrad.math.parts import with_padding, without_padding
from natgrad.math.staleness import is_similar
from natgrad.plan.pace import first_refresh, paces
from natgrad.rules.preconditioner import kept, opened

if TYPE_CHECKING:
    from natgrad.engine.agreement import Verdict

MAX_FAILURES = 3


Found = Inverse | InverseError


Findings = dict[str, Found]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A factor to prepare.

    Attributes:
        matrix: ``(s, n, n)``, or ``(s, n)`` when diagonal.
        form: as in the module.
        damping: what is added to it; not for ``"eigen"``.
        power: of the form ``"power"``.
        earlier: an eigendecomposition to bring up to date, instead of a new one.
        parts, padding: see Note [Parts of a large factor].
    """

    matrix: Tensor
    form: str
    damping: float = 0.0
    power: float = 1.0
    earlier: Inverse | None = None
    parts: int = 1
    padding: int = 0

    def pieces(self) -> "list[Wanted]":
        """Without padding, which no solver sees: the last part may be smaller."""
        matrices = without_padding(self.matrix, self.parts, self.padding)
        earlier: list[Inverse | None] = [None] * len(matrices)
        if self.earlier is not None:
            cut = [without_padding(x, self.parts, self.padding) for x in self.earlier]
            earlier = list(zip(*cut, strict=True))
        return [
            replace(self, matrix=x, earlier=old, parts=1, padding=0)
            for x, old in zip(matrices, earlier, strict=True)
        ]


def prepare(wanted: Sequence[Wanted]) -> list[Found]:
    """Each in its form, or why there is none; all of one form together."""
    groups: dict[Hashable, list[int]] = {}
    for i, w in enumerate(wanted):
        groups.setdefault((w.form, w.power), []).append(i)
    results: dict[int, Found] = {}
    for members in groups.values():
        pieces = {i: wanted[i].pieces() for i in members}
        found = iter(_prepare_alike([p for each in pieces.values() for p in each]))
        for i, each in pieces.items():
            results[i] = _joined([next(found) for _ in each], wanted[i].parts)
    return [results[i] for i in range(len(wanted))]


def _joined(found: Sequence[Found], parts: int) -> Found:
    whole: list[Inverse] = []
    for each in found:
        if isinstance(each, InverseError):
            return each
        whole.append(each)
    return tuple(with_padding(x, parts) for x in zip(*whole, strict=True))


def _prepare_alike(wanted: Sequence[Wanted]) -> list[Found]:
    matrices, form = [w.matrix for w in wanted], wanted[0].form
    if form == "moment":
        return [(x.clone(),) for x in matrices]
    if form == "eigen":
        return eigendecompositions(matrices, [w.earlier for w in wanted])
    ways: dict[str, Callable[..., list[Tensor | InverseError]]] = {
        "inverse": damped_inverses,
        "root": damped_roots,
        "power": partial(damped_powers, power=wanted[0].power),
    }
    found = ways[form](matrices, [w.damping for w in wanted])
    return [x if isinstance(x, InverseError) else (x,) for x in found]


class Statistics(Averages):
    """Averages that are refreshed when due: estimated, inverted and shared."""

    def refresh(
        self,
        sums: dict[str, Tensor],
        verdict: "Verdict",
        gradients: Mapping[str, Tensor],
    ) -> None:
        """Averages and inverses of what is due (SP-NGD, Algorithm 1).

        ``sums`` are the owned statistics' packed sums over ranks and micro-batches;
        ``gradients`` the means ``(s, m, n)`` of the blocks that this rank works on.
        """
        self._require_schedules()
        if self.account is not None:
            self.account.learn(verdict.facts, self.comm.world)
        due = self.due()
        self._set_pace(verdict)
        moved = [s for s in due if not s.spec.is_local]
        estimated = self._estimate(moved, sums, verdict)
        present = verdict.present
        local = [s for s in due if s.spec.is_local and s.spec.block in present]
        estimated += self._estimate_local(local, gradients)
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
        findings = self._invert([s for s in inverted if self.owns(s)])
        self._share_findings(inverted, findings)
        self._share_inverses([s for s in inverted if s.failures == 0])
        self._advance(estimated, inverted)

    def _require_schedules(self) -> None:
        """Raise on a schedule's illegal value before anything has changed."""
        for parts in self._distinct:
            damping_at(parts.damping, self.step)
            parts.refresh.after_statistic(self.step, Timing())
            parts.refresh.after_inverse(self.step, Timing())

    def _set_pace(self, verdict: "Verdict") -> None:
        """When all are due: how often each may be inverted, if its policy asks."""
        shares = {
            name: share
            for name, parts in self.parts.items()
            if (share := parts.refresh.share_of_step()) is not None
        }
        captured = [s for s in self.states.values() if not s.spec.is_local]
        if not shares or len(verdict.counts) < len(captured):
            return
        for share in set(shares.values()):
            blocks = [b for b in self.plan.blocks if shares.get(b.name) == share]
            found = paces(blocks, verdict.counts, self.cost, share)
            for name, interval in found.items():
                self.states[name].timing.interval = interval

    def _announce(self, inverted: list[StatisticState]) -> None:
        """A line on stderr before inversions that take a while, the first time."""
        fresh = [s.spec for s in inverted if not s.timing.inverted]
        place = self.plan.owners, self.cost, self.like.device
        if self.comm.rank == 0 and fresh and (line := first_refresh(fresh, *place)):
            print(line, file=sys.stderr, flush=True)

    def _invert(self, mine: list[StatisticState]) -> Findings:
        """New inverses of owned statistics, or why there is none."""
        if self.seconds is not None and len(mine) > 1:
            parts = [self._invert([s]) for s in mine]  # each is timed on its own
            return {name: found for part in parts for name, found in part.items()}
        began, model = time.perf_counter(), self.cost
        shares: dict[str, float] = {}
        if self.meter.running:
            shares = {s.spec.name: model.invert(s.spec) for s in mine}
        with self.meter("invert", shares):
            findings = self._decompose(mine)
        if self.seconds is not None:
            spent = time.perf_counter() - began
            self.seconds.update(dict.fromkeys(findings, spent))
        return findings

    def _decompose(self, mine: list[StatisticState]) -> Findings:
        found = prepare([self._wanted(s) for s in mine])
        return {
            s.spec.name: x if isinstance(x, InverseError) else kept(x, s.spec)
            for s, x in zip(mine, found, strict=True)
        }

    def _wanted(self, s: StatisticState) -> Wanted:
        rule, form = self._rule(s), self.form(s)
        tracked = form == "eigen" and rule.basis == "tracked"
        return Wanted(
            matrix=self.dense(s),
            form=form,
            damping=0.0 if form in ("eigen", "moment") else self.factor_damping(s),
            power=rule.power or 1.0,
            earlier=s.inverse if tracked else None,
            parts=s.spec.parts,
            padding=s.spec.padding,
        )

    def _share_findings(
        self, inverted: list[StatisticState], findings: Findings
    ) -> None:
        """Install owners' inverses; make interval and failures known to all ranks."""
        known: list[float] = []
        intervals = self._judge(findings)
        for s in inverted:
            found, mean = findings.get(s.spec.name), s.mean_eigenvalue
            if found is None:
                known += [0, 0, 0]
            elif isinstance(found, InverseError):
                known += [s.timing.interval, s.failures + 1, mean]
            else:
                known += [intervals[s.spec.name], 0, mean]
                s.inverse = found
        if known and self.comm.world > 1:
            vector = self.like.new_tensor(known, dtype=torch.float64)
            known = self.comm.agree(vector).tolist()
        for s, interval, failures, mean in zip(
            inverted, known[::3], known[1::3], known[2::3], strict=True
        ):
            s.failures, s.mean_eigenvalue = int(failures), mean
            s.timing.previous, s.timing.interval = s.timing.interval, int(interval)
        _report_failures([s for s in inverted if s.failures], self.comm.rank)

    def _judge(self, findings: Findings) -> dict[str, int]:
        """The next interval of each new inverse, from it and the two before it."""
        found = {n: x for n, x in findings.items() if not isinstance(x, InverseError)}
        states = [self.states[name] for name in found]
        intervals = {s.spec.name: s.timing.interval for s in states}
        states = [s for s in states if self._refresh(s).tolerance is not None]
        # all are compared before one is read: that is one synchronisation
        compared = [self._compare(s, found[s.spec.name]) for s in states]
        flat = [x for similar in compared for x in similar]
        known: Iterator[bool] = iter(torch.stack(flat).tolist() if flat else ())
        for s, similar in zip(states, compared, strict=True):
            last, before = [*(next(known) for _ in similar), False, False][:2]
            judge = self._refresh(s).judge
            intervals[s.spec.name] = judge(last, before, s.timing)
        return intervals

    def _compare(self, s: StatisticState, new: Inverse) -> list[Tensor]:
        """Whether a damped inverse is similar to the last and to the one before."""
        limit = self._refresh(s).tolerance
        assert limit is not None
        damped = new[0]
        if self.is_eigen(s):
            damped = damped_from_eigen(new[0], new[1], self.factor_damping(s))
        flat = triangle(damped, s.spec) if s.spec.packing else flatten(damped)
        if s.spec.packing == "upper":
            similar = [is_similar(flat, x, limit) for x in s.history]
        else:  # packed, the Frobenius norm would miss half of the matrix
            damped = opened((damped,), s.spec)[0]
            dense = s.spec.stack, s.spec.size, s.spec.diagonal
            earlier = (unflatten(x, *dense) for x in s.history)
            similar = [is_similar(damped, x, limit) for x in earlier]
        s.history = [flat, *s.history[:1]]
        return similar

    def _share_inverses(self, states: list[StatisticState]) -> None:
        if self.comm.world == 1 or not states:
            return
        names = [s.spec.name for s in states]
        flight = self.comm.begin(
            "share_inverses", names, self.like.dtype, self.like.device
        )
        for s in states:
            if self.owns(s) and s.inverse is not None:
                flight.put(s.spec.name, pack(s.inverse, s.spec, self.form(s)))
        # in half precision an owner gets its own back, rounded as others see it
        for name, flat in flight.finish().items():
            s = self.states[name]
            s.inverse = unpack(flat, s.spec, self.form(s))

    def _advance(
        self, estimated: list[StatisticState], inverted: list[StatisticState]
    ) -> None:
        """Set when each statistic is due next; forget averages nobody will need."""
        fresh = {s.spec.name for s in estimated}
        names = tuple(s.spec.name for s in inverted)
        self.last = Refreshed(estimated=tuple(sorted(fresh)), inverted=names)
        for s in inverted:
            s.timing.inverted += 1
            s.timing.inverted_at = self.step
            s.timing.inverses_at = self._refresh(s).after_inverse(self.step, s.timing)
        for name, s in self.states.items():
            if name in fresh:
                s.timing.refreshed += 1
                s.timing.refreshed_at = self.step
                after = self._refresh(s).after_statistic
                s.timing.statistics_at = after(self.step, s.timing)
            else:
                s.timing.skipped += 1
        for s in inverted:
            replaced = s.timing.statistics_at <= s.timing.inverses_at
            if self.options.factor_decay == 0.0 and replaced and not s.failures:
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
