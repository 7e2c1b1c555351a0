"""The parts of a step that `KFAC` and `SPNGD` share, in the order a step runs them.

Note [One decision on all ranks]
Ranks must agree on what is refreshed, skipped and quarantined, or they would wait for
each other for ever. Everything such a decision needs goes through `Communicator.agree`
(a small sum over ranks): whether gradients are finite, which blocks have one, each due
statistic's trace and count (`Verdict`), and what owners found when they inverted. The
traces also give every rank the mean eigenvalues for the pi-split, whoever owns the
factors. Reading the verdict is the step's one synchronisation.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from natgrad import state as saved_state
from natgrad.capture import POSITION_KINDS, Capture, Captured
from natgrad.comm import Communicator, CommOptions, world_of
from natgrad.config import Curvature
from natgrad.layers import Block, find_blocks
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
from natgrad.plan import Strategy, make_plan
from natgrad.state import StatisticState

MAX_FAILURES = 3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What all ranks know alike of this step.

    Attributes:
        finite: whether every gradient on every rank is.
        present: names of the blocks that have a gradient on some rank.
        traces, counts: of each due statistic, summed over ranks.
    """

    finite: bool
    present: frozenset[str]
    traces: dict[str, float]
    counts: dict[str, float]

    def usable(self, name: str) -> bool:
        """Whether a due statistic was seen at all, and is finite."""
        return math.isfinite(self.traces[name]) and self.counts[name] > 0


class Engine:
    """Blocks, plan, statistics and their exchange for one model."""

    def __init__(
        self,
        model: nn.Module,
        curvature: Curvature,
        *,
        strategy: str | Strategy,
        placement: str,
        comm: CommOptions,
        group: Any,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.curvature = curvature
        self.step = 0
        self.skipped_steps = 0
        self.closed = False
        ddp = isinstance(model, DistributedDataParallel)
        self.model: nn.Module = model.module if ddp else model
        self.blocks = find_blocks(
            self.model,
            norm=curvature.norm,
            sharing=curvature.sharing,
            loss=curvature.loss,
            skip=curvature.skip,
        )
        _require_blocks(self.model, self.blocks)
        self.block = {b.name: b for b in self.blocks}
        self.states = {
            s.name: StatisticState(spec=s) for b in self.blocks for s in b.spec.statistics
        }
        self.like = _like(self.blocks)
        self.plan = make_plan(
            [b.spec for b in self.blocks],
            world=world_of(group),
            strategy=strategy,
            placement=placement,
            gradients="ddp" if ddp else "own",
            inverse=curvature.damping_style,
        )
        self.comm = Communicator(self.plan, comm, group, fingerprint=repr(curvature))
        self.own_gradients = not ddp and self.comm.world > 1
        self.capture = Capture(
            self.model,
            self.blocks,
            loss=curvature.loss,
            sampled=curvature.fisher == "sampled",
            grad_scaler=grad_scaler,
        )
        self.begin()

    # -- what is due ------------------------------------------------------------------

    def begin(self) -> None:
        """Tell the hooks what the coming step estimates."""
        self.capture.due = frozenset(
            s.spec.name
            for s in self.states.values()
            if s.timing.statistics_at <= self.step
        )

    def due_statistics(self) -> list[StatisticState]:
        """The statistics to estimate in this step, in the plan's order."""
        return [s for name, s in self.states.items() if name in self.capture.due]

    def due_inverses(self) -> list[StatisticState]:
        """The statistics to invert in this step: those that have an estimate."""
        return [
            s
            for s in self.states.values()
            if s.timing.inverses_at <= self.step and s.estimated
        ]

    # -- the step, in order -----------------------------------------------------------

    def reduce_statistics(self) -> tuple[Captured, dict[str, Tensor]]:
        """Packed sums over all ranks of the due statistics that this rank owns."""
        captured = self.capture.take()
        names = [s.spec.name for s in self.due_statistics()]
        flight = self.comm.begin(
            "reduce_statistics", names, self.like.dtype, self.like.device
        )
        for name in names:
            if name in captured.sums:
                flight.put(name, _flat(captured.sums[name]))
        return captured, flight.finish()

    def reduce_gradients(self) -> dict[str, Tensor]:
        """Mean gradients ``(s, m, n)`` of the blocks that this rank works on."""
        local = {b.name: b.gradient() for b in self.blocks}
        if not self.own_gradients:
            return {name: g for name, g in local.items() if g is not None}
        flight = self.comm.begin(
            "reduce_gradients", list(local), self.like.dtype, self.like.device
        )
        for name, g in local.items():
            if g is not None:
                flight.put(name, g.flatten())
        return {
            name: flat.div_(self.comm.world).reshape(_shape(self.block[name]))
            for name, flat in flight.finish().items()
        }

    def agree(self, captured: Captured) -> Verdict:
        """See Note [One decision on all ranks]."""
        due = self.due_statistics()
        grads = [p.grad for b in self.blocks for p in b.parameters if p.grad is not None]
        present = [b.parameters[0].grad is not None for b in self.blocks]
        counts = [captured.count(s.spec.name) for s in due]
        host = self.like.new_tensor([*present, *counts], dtype=torch.float64)
        device = [_total_norm(grads, self.like), *self._traces(due, captured)]
        vector = torch.cat((torch.stack(device).double(), host))
        total = self.comm.agree(vector).tolist()
        traces, rest = total[1 : 1 + len(due)], total[1 + len(due) :]
        names = [s.spec.name for s in due]
        return Verdict(
            finite=math.isfinite(total[0]),
            present=frozenset(
                b.name for b, n in zip(self.blocks, rest, strict=False) if n > 0
            ),
            traces=dict(zip(names, traces, strict=True)),
            counts=dict(zip(names, rest[len(present) :], strict=True)),
        )

    def refresh(self, sums: dict[str, Tensor], k: int, verdict: Verdict) -> None:
        """Running averages and inverses of what is due; k micro-batches were summed."""
        estimated = self._estimate(sums, k, verdict)
        inverted = self.due_inverses()
        results = self._invert([s for s in inverted if self._owns(s)])
        self._share_findings(inverted, results)
        self._share_inverses([s for s in inverted if s.failures == 0])
        self._advance(estimated, inverted)

    def precondition(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Natural gradients of the blocks that have inverses; plain ones otherwise."""
        return {
            name: self._precondition(self.block[name], g)
            for name, g in gradients.items()
            if self.works_on(name)
        }

    def share(
        self, values: dict[str, Tensor], present: frozenset[str]
    ) -> dict[str, Tensor]:
        """Workers' tensors (updates or weights) on every rank, as ``(s, m, n)``."""
        names = [b.name for b in self.blocks if b.name in present]
        flight = self.comm.begin(
            "share_updates", names, self.like.dtype, self.like.device
        )
        for name in names:
            if name in values:
                flight.put(name, values[name].flatten())
        received = flight.finish()
        shared = {
            name: flat.reshape(_shape(self.block[name]))
            for name, flat in received.items()
        }
        return values | shared

    def write_gradients(self, updates: dict[str, Tensor], scale: Tensor | None) -> None:
        """Put updates into ``.grad``; plain blocks keep theirs and are not clipped."""
        for name, update in updates.items():
            block = self.block[name]
            if scale is not None and block.kind is not None:
                update = update * scale
            if block.kind is not None or self.own_gradients:
                block.write_gradient(update)

    def skip_step(self) -> None:
        """Leave everything as it was: a gradient is not finite on some rank."""
        self.skipped_steps += 1
        if self.comm.rank == 0:
            warnings.warn(
                f"Step {self.step} is skipped: a gradient is not finite "
                f"({self.skipped_steps} skipped so far).",
                stacklevel=3,
            )
        for block in self.blocks:
            for p in block.parameters:
                p.grad = None
        self.begin()

    def zero(self) -> Tensor:
        """A scalar zero of the dtype and device of statistics."""
        return self.like.new_zeros(())

    def counts_for_clip(self, name: str) -> bool:
        """Whether this rank adds a block to the KL clip's sum."""
        return self.block[name].kind is not None and self.speaks_for(name)

    def end(self) -> None:
        """Count the step and tell the hooks what the next one estimates."""
        if self.step == 0:
            self.warn_silent()
        self.step += 1
        self.begin()

    # -- pieces -----------------------------------------------------------------------

    def works_on(self, name: str) -> bool:
        """Whether this rank preconditions a block."""
        return self.comm.rank in self.plan.workers[name]

    def speaks_for(self, name: str) -> bool:
        """Whether this rank counts a block in sums over all blocks."""
        return self.plan.workers[name][0] == self.comm.rank

    def damping_of(self, block: Block) -> float:
        """Lambda of a block at this step."""
        ratio = self.curvature.norm_damping_ratio if block.is_norm else 1.0
        return ratio * self.curvature.damping_at(self.step)

    def _owns(self, state: StatisticState) -> bool:
        return self.plan.owners[state.spec.name] == self.comm.rank

    def _traces(self, due: Sequence[StatisticState], captured: Captured) -> list[Tensor]:
        zero = self.like.new_zeros(())
        k2 = self._accumulation_factor(captured.forwards)
        traces: list[Tensor] = []
        for s in due:
            x = captured.sums.get(s.spec.name)
            trace = zero if x is None else _trace(x)
            traces.append(trace if _is_position(s) else trace * k2)
        return traces

    def _accumulation_factor(self, k: int) -> float:
        return float(k * k) if self.curvature.accumulation == "mean" else 1.0

    def _estimate(
        self, sums: dict[str, Tensor], k: int, verdict: Verdict
    ) -> list[StatisticState]:
        """Fold the estimates into the averages (Pauloski et al., eq. 16-17)."""
        usable = [s for s in self.due_statistics() if verdict.usable(s.spec.name)]
        k2 = self._accumulation_factor(k)
        for s in self.due_statistics():
            name = s.spec.name
            if not verdict.usable(name):
                s.quarantined += not math.isfinite(verdict.traces[name])
                continue
            # The first estimate starts the average.
            decay = self.curvature.decay if s.estimated else 0.0
            mean = verdict.traces[name] / verdict.counts[name]
            mean /= s.spec.stack * s.spec.size
            s.mean_eigenvalue = decay * s.mean_eigenvalue + (1 - decay) * mean
            s.estimated = True
            if self._owns(s):
                scale = (1.0 if _is_position(s) else k2) / verdict.counts[name]
                self._average(s, sums[name].mul_(scale), decay)
        return usable

    def _average(self, s: StatisticState, estimate: Tensor, decay: float) -> None:
        if s.average is None or decay == 0.0:
            s.average = estimate
        else:
            s.average.mul_(decay).add_(estimate, alpha=1 - decay)

    def _invert(
        self, states: list[StatisticState]
    ) -> dict[str, Inverse | InverseError]:
        """The new inverses of owned statistics; `history` and `timing` as judged."""
        eigen = [s for s in states if self._is_eigen(s)]
        plain = [s for s in states if not self._is_eigen(s)]
        results: dict[str, Inverse | InverseError] = {}
        for s, x in zip(eigen, eigendecompositions(_dense(eigen)), strict=True):
            results[s.spec.name] = x
        dampings = [self.factor_damping(s) for s in plain]
        for s, x in zip(plain, damped_inverses(_dense(plain), dampings), strict=True):
            results[s.spec.name] = x if isinstance(x, InverseError) else (x,)
        return results

    def _is_eigen(self, s: StatisticState) -> bool:
        two_sided = len(self.block[s.spec.block].spec.statistics) == 2
        return two_sided and self.curvature.damping_style == "eigen"

    def factor_damping(self, s: StatisticState) -> float:
        """What is added to one factor: all of lambda, or its part of the pi-split."""
        block = self.block[s.spec.block]
        damping = self.damping_of(block)
        if len(block.spec.statistics) == 1:
            return damping
        right, left = (self.states[x.name] for x in block.spec.statistics)
        pi = pi_split(right.mean_eigenvalue, left.mean_eigenvalue)
        return split_damping(damping, pi)[s is left]

    def _share_findings(
        self,
        inverted: list[StatisticState],
        results: dict[str, Inverse | InverseError],
    ) -> None:
        """Install owners' inverses; make interval and failures known to all ranks."""
        findings: list[float] = []
        for s in inverted:
            result = results.get(s.spec.name)
            if result is None:
                findings += [0, 0]
            elif isinstance(result, InverseError):
                findings += [s.timing.interval, s.failures + 1]
            else:
                findings += [self._judge(s, result), 0]
                s.inverse = result
        if findings and self.comm.world > 1:
            vector = self.like.new_tensor(findings, dtype=torch.float64)
            findings = self.comm.agree(vector).tolist()
        for s, interval, failures in zip(
            inverted, findings[::2], findings[1::2], strict=True
        ):
            s.failures = int(failures)
            s.timing.previous, s.timing.interval = s.timing.interval, int(interval)
        _report_failures([s for s in inverted if s.failures], self.comm.rank)

    def _judge(self, s: StatisticState, new: Inverse) -> int:
        """The next interval, from the damped inverse and the two before it."""
        refresh = self.curvature.refresh
        if not refresh.judges:
            return s.timing.interval
        damped = new[0]
        if self._is_eigen(s):
            damped = damped_from_eigen(new[0], new[1], self.factor_damping(s))
        packed = _flat(damped)
        tolerance: float = getattr(refresh, "tolerance", 0.0)
        similar = [is_similar(packed, old, tolerance) for old in s.history]
        similar += [False] * (2 - len(similar))
        s.history = [packed, *s.history[:1]]
        return refresh.judge(similar[0], similar[1], s.timing)

    def _share_inverses(self, states: list[StatisticState]) -> None:
        if self.comm.world == 1:
            return
        names = [s.spec.name for s in states]
        flight = self.comm.begin(
            "share_inverses", names, self.like.dtype, self.like.device
        )
        for s in states:
            if self._owns(s) and s.inverse is not None:
                flight.put(s.spec.name, self._pack_inverse(s, s.inverse))
        for name, flat in flight.finish().items():
            s = self.states[name]
            if not self._owns(s):
                s.inverse = self._unpack_inverse(s, flat)

    def _pack_inverse(self, s: StatisticState, inverse: Inverse) -> Tensor:
        if self._is_eigen(s):
            return torch.cat([x.flatten() for x in inverse])
        return _flat(inverse[0])

    def _unpack_inverse(self, s: StatisticState, flat: Tensor) -> Inverse:
        stack, size = s.spec.stack, s.spec.size
        if self._is_eigen(s):
            vectors, values = flat.split([flat.numel() - stack * size, stack * size])
            square = vectors if s.spec.diagonal else vectors.reshape(stack, size, size)
            return square, values.reshape(stack, size)
        return (_unflat(flat, s),)

    def _advance(
        self, estimated: list[StatisticState], inverted: list[StatisticState]
    ) -> None:
        """Set when each statistic is due next; forget averages nobody will need."""
        refresh, fresh = self.curvature.refresh, {s.spec.name for s in estimated}
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
            if self.curvature.decay == 0.0 and replaced and not s.failures:
                s.average, s.estimated = None, False

    def _precondition(self, block: Block, gradient: Tensor) -> Tensor:
        states = [self.states[s.name] for s in block.spec.statistics]
        inverses = [s.inverse for s in states if s.inverse is not None]
        if not states or len(inverses) < len(states):
            return gradient
        if self._is_eigen(states[0]):
            right, left = inverses
            return apply_eigen(gradient, right, left, self.damping_of(block))
        left = inverses[1] if len(inverses) == 2 else None
        return apply_inverses(gradient, inverses[0], left)

    # -- for users --------------------------------------------------------------------

    def sampled_backward(
        self, outputs: Tensor, likelihood: str, targets: Tensor | None
    ) -> None:
        """Backward of labels drawn from the model; gradients stay as they are."""
        from natgrad.sampling import sampled_loss

        if self.curvature.fisher != "sampled":
            raise RuntimeError(
                "sampled_backward needs fisher='sampled'; this one was made with "
                f"fisher={self.curvature.fisher!r}."
            )
        if not self.capture.due:
            return
        loss = sampled_loss(outputs, likelihood, targets, self.curvature.loss)
        weights = [b.parameters[0] for b in self.blocks if b.kind is not None]
        with self.capture.sampling():
            torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)

    def statistic(self, name: str) -> Tensor:
        """The running average of a statistic that this rank owns, dense."""
        if name not in self.states:
            raise KeyError(
                f"Unknown statistic {name!r}. Must be one of {', '.join(self.states)}."
            )
        average = self.states[name].average
        if average is None:
            raise RuntimeError(f"Statistic {name!r} is not kept on this rank now.")
        return _unflat(average, self.states[name])

    def warn_silent(self) -> None:
        """Warn of layers whose hooks have not fired by the end of the first step."""
        silent = sorted(
            b.name
            for b in self.blocks
            if b.kind is not None
            and not any(s.name in self.capture.fired for s in b.spec.statistics)
        )
        if silent:
            warnings.warn(
                f"natgrad saw no forward and backward of {', '.join(silent)}: the plain "
                "gradient is used until it does. Was the model called in training mode"
                + (
                    ", and sampled_backward(outputs) before loss.backward()?"
                    if self.curvature.fisher == "sampled"
                    else "?"
                ),
                stacklevel=4,
            )

    def state_dict(self) -> dict[str, Any]:
        """Statistics, inverses and timing, as tensors and numbers."""
        return saved_state.save(self.states.values(), self.step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.step = saved_state.load(self.states, state, self.like)
        self.capture.take()
        self.begin()

    def close(self) -> None:
        """Remove every hook."""
        self.capture.close()
        self.closed = True

    def require_open(self) -> None:
        """Raise if `close` was called."""
        if self.closed:
            raise RuntimeError("This optimizer was closed: make a new one to go on.")


def _require_blocks(model: nn.Module, blocks: list[Block]) -> None:
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to train.")
    if not any(b.kind is not None for b in blocks):
        kinds = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(
            f"{type(model).__name__} has no trainable layer of a known kind among "
            f"{', '.join(kinds)}. natgrad.register_layer(type, kind) adds one."
        )


def _report_failures(failed: list[StatisticState], rank: int) -> None:
    """Warn of inverses that were kept; raise, on every rank, after three in a row."""
    for s in failed:
        message = (
            f"The inverse of {s.spec.name} (size {s.spec.size}) failed, with jitter and "
            f"in float64 too, {s.failures} time(s) in a row"
        )
        if s.failures >= MAX_FAILURES:
            raise InverseError(f"{message}. Raise the damping, or skip this layer.")
        if rank == 0:
            warnings.warn(f"{message}. The last good one is used.", stacklevel=5)


def _like(blocks: list[Block]) -> Tensor:
    """An empty tensor of the dtype and device that statistics are kept in."""
    first = blocks[0].parameters[0]
    wide = any(p.dtype == torch.float64 for b in blocks for p in b.parameters)
    return first.new_empty(0, dtype=torch.float64 if wide else torch.float32).detach()


def _shape(block: Block) -> tuple[int, int, int]:
    return block.spec.stack, block.spec.rows, block.spec.cols


def _is_position(s: StatisticState) -> bool:
    return s.spec.kind in POSITION_KINDS


def _flat(x: Tensor) -> Tensor:
    return x.flatten() if x.dim() == 2 else pack(x)


def _unflat(flat: Tensor, s: StatisticState) -> Tensor:
    if s.spec.diagonal:
        return flat.reshape(s.spec.stack, s.spec.size)
    return unpack(flat, s.spec.stack, s.spec.size)


def _dense(states: list[StatisticState]) -> list[Tensor]:
    return [_unflat(s.average, s) for s in states if s.average is not None]


def _trace(x: Tensor) -> Tensor:
    return x.sum() if x.dim() == 2 else x.diagonal(dim1=-2, dim2=-1).sum()


def _total_norm(grads: list[Tensor], like: Tensor) -> Tensor:
    """Finite just when every gradient is."""
    if not grads:
        return like.new_zeros(())
    return torch.stack([x.to(like.dtype) for x in torch._foreach_norm(grads)]).sum()
