"""Damping, learning rate and momentum, found by the quadratic model of the loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from natgrad.capture.recorder import Capture
from natgrad.capture.sampling import drawn_backward
from natgrad.factors.averages import damping_at
from natgrad.factors.statistics import Statistics
from natgrad.math.outputs import Product, sampled_gradients
from natgrad.math.quadratic import (
    POOR,
    change,
    expected_fall,
    followed,
    followed_fall,
    is_straight,
    minimiser,
    paced,
    reduction_ratio,
    trusted,
)
from natgrad.quadratic.damping import Lambda
from natgrad.quadratic.model import Along, measure, output_hessian, slope_along
from natgrad.quadratic.options import AUTO
from natgrad.quadratic.replay import Closure, Replay, Run, Weights

if TYPE_CHECKING:
    from natgrad.options import Options

FOUND = ("ratio", "lr", "momentum", "trust")
"""What `Tuner.health` shows beside damping."""
GROWN = 2.0
"""A step is taken back if another batch's loss grew by this many times the fall that
was expected for its own."""


class Tuner:
    """Runs closures, and finds what is ``"auto"``.

    Args:
        model: the plain module.
        statistics: of its layers, which count the steps.
        capture: what listens to its forwards and backwards.
        options: as they were given, with ``"auto"`` in them.
        damping: the value of the damping, if that is automatic.

    Attributes:
        ratio: the last reduction ratio; NaN before the first.
        lr, momentum: the last that were found.
        trust: the part of the best learning rate for a batch that is best for others
            (`natgrad.math.quadratic.trusted`).
    """

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics,
        capture: Capture,
        options: "Options",
        damping: Lambda | None,
    ) -> None:
        self._model, self._statistics, self._capture = model, statistics, capture
        self._options, self._damping = options, damping
        self.finds_lr = options.lr == AUTO
        self.finds_momentum = options.momentum == AUTO
        self._replay = Replay(model, capture.ignoring, options.batch_part)
        self.ratio = math.nan
        self.lr = self.momentum = math.nan
        self.trust = 1.0
        self._predicted: float | None = None
        self._reached = math.inf
        self._usual, self._unusual = 0.0, False
        self._solution, self._interval, self._again = (0.0, 0.0), 1, 0
        self._promised = 0.0
        self._parameters: dict[str, nn.Parameter] = {}
        self._runs: list[Run] = []
        self._hessians: list[Product] = []
        self._expected: tuple[float, float, Mapping[str, float]] | None = None
        self._start: tuple[Weights, Weights, Mapping[str, float]] | None = None
        self.written: list[tuple[float, float]] = []

    @property
    def is_due(self) -> bool:
        """Whether damping learns from this step in any case."""
        if self._damping is None:
            return False
        step, every = self._statistics.step, self._damping.options.every
        # at first, and after a step that was bad, the next may be as bad
        return step < every or step % every == 0 or self.ratio < 0

    @property
    def solves(self) -> bool:
        """Whether this step needs products with the Gauss-Newton matrix."""
        finds = self.finds_lr or self.finds_momentum
        return self.is_due or (finds and self._statistics.step >= self._again)

    def damping(self) -> float:
        """Lambda of the quadratic model."""
        parts = self._statistics.options.parts()
        in_units = parts.rule.natural and getattr(parts.rule, "style", "") != "relative"
        return damping_at(parts.damping, self._statistics.step) if in_units else 0.0

    def evaluate(self, closure: Any, zero_grad: Callable[[], None]) -> Tensor:
        """Run closures and their backwards; returns the loss of all of them.

        A sequence of closures is one of micro-batches.
        """
        closures: list[Any] = [closure] if callable(closure) else [*(closure or ())]
        if not closures:
            raise TypeError(
                "lr='auto', momentum='auto' and damping='auto' need a closure: "
                "step(closure), which returns (outputs, loss) and does not call "
                "backward: step() does."
            )
        sampled = self._options.fisher == "sampled"
        zero_grad()
        self._parameters = dict(self._model.named_parameters())
        self._runs, self._hessians = [], []
        if sampled:  # the gradients drawn have the scale of the whole step's loss
            self._capture.set_loss_terms(1, whole_step=True)
        share = 1 / len(closures) if self._options.accumulation == "mean" else 1.0
        with torch.enable_grad():
            for each in closures:
                self._run(each, share, sampled)
        if self._damping is not None and self._damping.value is None:
            self._damping.start(self._first_damping())
        losses = [run.share * run.loss.detach() for run in self._runs]
        return torch.stack(losses).sum()

    def _run(self, closure: Closure, share: float, sampled: bool) -> None:
        capture, blocks = self._capture, self._statistics.block.values()
        run = Run(closure, [self._statistics.like.device], share)
        solves, draws = self.solves, sampled and bool(capture.armed.due)
        if solves or draws:
            with capture.ignoring():
                product = output_hessian(run, self._options.hessian)
            self._hessians.append(product)
            if draws:
                with capture.ignoring():
                    drawn = sampled_gradients(run.outputs, product)
                drawn_backward(capture, blocks, run.outputs, drawn)
        (run.loss * share).backward(retain_graph=solves)  # pyright: ignore[reportUnknownMemberType]
        self._runs.append(run)

    def _first_damping(self) -> float:
        """The curvature along the mean gradient of all ranks."""
        comm, weights, own = self._statistics.comm, self._weights(), self._gradients()
        trained = {n for n, p in self._parameters.items() if p.requires_grad}
        gradients = {
            n: own[n] if n in own else torch.zeros_like(w)
            for n, w in weights.items()
            if n in trained
        }
        if comm.world > 1:  # once in a training
            gradients = {n: comm.agree(g) / comm.world for n, g in gradients.items()}
        along = self.along([gradients], weights, gradients, {})
        found = along.products[0][0] / (along.squares[0][0] or 1.0)
        return found if found > 0 and math.isfinite(found) else 1.0

    def names(self) -> dict[int, str]:
        """The names of parameters, by their ids."""
        return {id(p): name for name, p in self._parameters.items()}

    def _weights(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self._parameters.items()}

    def _gradients(self) -> dict[str, Tensor]:
        named = self._parameters.items()
        return {n: p.grad for n, p in named if p.grad is not None}

    def along(
        self,
        directions: Sequence[Weights],
        weights: Weights,
        gradients: Weights,
        decay: Mapping[str, float],
    ) -> Along:
        """The quadratic model of this step's objective."""
        return measure(
            self._replay,
            self._runs,
            self._hessians,
            self._statistics.comm,
            weights=weights,
            gradients=gradients,
            decay=decay,
            directions=directions,
        )

    def solve(
        self,
        update: Weights,
        last: Weights,
        decay: Mapping[str, float],
        scale: float = 1.0,
    ) -> tuple[float, float]:
        """Coefficients of the update and of the last step; 1 of what is not sought.

        They follow the least of the damped quadratic model (Martens and Grosse 2015,
        section 7) by `trust`, which with ``scale`` then multiplies the first.
        ``decay`` is the weight decay by name.
        """
        lr, momentum = self.finds_lr, self.finds_momentum
        fixed = (None if lr else 1.0, None if momentum else 1.0)
        along = self.along([update, last], self._weights(), self._gradients(), decay)
        damped = along.damped(self.damping())
        if lr:
            self.trust = trusted(self.trust, along.slopes[1], damped[1][1])
        best, old = minimiser(along.slopes, damped, fixed), self._solution
        found = followed(old, best, self.trust)
        self._interval = paced(self._interval, old, found, self.ratio)
        self._again = self._statistics.step + self._interval
        self._solution = found
        x = self._scaled(found, scale)
        self._promised = self._predicted = change(along.slopes, along.products, x)
        self._usual, unusual = followed_fall(self._usual, abs(self._promised))
        self._unusual = unusual and not self.is_due
        if self.is_due or self._unusual:
            self._expect(self._predicted, decay)
        return x

    def hold(self, scale: float) -> tuple[float, float]:
        """As `solve`, in a step that does not `solves`: what was found last."""
        self._expected = self._predicted = None
        if not (self.finds_lr or self.finds_momentum):
            return 1.0, 1.0
        self._predicted = self._promised  # what a bad step is known by
        return self._scaled(self._solution, scale)

    def _scaled(self, x: tuple[float, float], scale: float) -> tuple[float, float]:
        return (x[0] * self.trust * scale, x[1]) if self.finds_lr else x

    def regrets(self, last: Weights, decay: Mapping[str, float]) -> bool:
        """Before a step, with its batch: whether the last step, ``last``, was bad.

        Damping learns from it if the growth was more than in proportion to the step: if
        not, another length would have been as bad, and it is what batches differ by.
        Only a loss above the last one is reason to compute it at the last weights too.
        """
        predicted, self._predicted = self._predicted, None
        reached, self._reached = self._reached, self._objective(decay)
        if predicted is None or self._reached <= reached:
            return False
        weights = self._weights()
        before = {n: w - last[n] if n in last else w for n, w in weights.items()}
        start = self._objective(decay, before)
        grown = self._reached - start
        if grown <= GROWN * expected_fall(predicted, self.ratio):
            return False
        slope = slope_along(
            last, weights, self._gradients(), decay, self._statistics.comm
        )
        if is_straight(grown, slope):
            self._forget()
        else:
            self.fail()
        self._reached = start
        return True

    def begin(self, decay: Mapping[str, float]) -> None:
        """Before somebody else takes a step: remember what it will be compared with."""
        self._start = None
        if self.is_due:
            weights = {n: w.clone() for n, w in self._weights().items()}
            gradients = {n: g.clone() for n, g in self._gradients().items()}
            self._start = weights, gradients, decay
            self._expect(0.0, decay)

    def look(self) -> None:
        """After that step: what the model predicts of it, and `judge`."""
        if self._start is None or self._expected is None:
            return
        weights, gradients, decay = self._start
        now = self._weights()
        step = {n: now[n] - w for n, w in weights.items() if n in gradients}
        along = self.along([step], weights, gradients, decay)
        predicted = change(along.slopes, along.products, (1.0,))
        self._expected = (self._expected[0], predicted, decay)
        self._start = None
        self.judge()

    def _expect(self, predicted: float, decay: Mapping[str, float]) -> None:
        self._expected = self._objective(decay), predicted, decay

    def judge(self) -> bool:
        """After the step: let damping follow; whether the objective got no worse."""
        expected, self._expected = self._expected, None
        if expected is None or self._damping is None:
            return True
        before, predicted, decay = expected
        after = self._objective(decay, self._weights())
        least = 4 * torch.finfo(self._statistics.like.dtype).eps * abs(before)
        ratio = reduction_ratio(before, after, predicted, least)
        if self._unusual and not ratio < POOR:  # damping falls by those that are due
            return True
        self.ratio = ratio
        self._damping.follow(self.ratio, self.trust)
        if self.ratio < 0:
            self._predicted = None
        return not self.ratio < 0

    def fail(self) -> None:
        """Learn that the last step led to where nothing is finite."""
        self._forget()
        self.ratio = -math.inf
        if self._damping is not None and self._damping.value is not None:
            self._damping.follow(self.ratio, self.trust)

    def _forget(self) -> None:
        """Nothing that was found before holds any more."""
        self._predicted = None
        self._interval, self._again = 1, 0

    def _objective(
        self, decay: Mapping[str, float], weights: Weights | None = None
    ) -> float:
        """Mean loss of all ranks and weight decay; at the weights that ran if None."""
        losses = [
            run.share
            * (
                run.loss.detach()
                if weights is None
                else self._replay.loss(run, weights)
            )
            for run in self._runs
        ]
        total = torch.stack(losses).double().sum()
        weights = self._weights() if weights is None else weights
        for name in (n for n in decay if decay[n]):
            total = total + decay[name] * weights[name].double().square().sum() / 2
        comm = self._statistics.comm
        return float(comm.agree(total.reshape(1))) / comm.world

    def end(self) -> None:
        """Discard what the step has kept."""
        self._runs, self._hessians = [], []
        self._start = self._expected = None

    def health(self) -> dict[str, float]:
        """What was found last."""
        return {"damping": self.damping()} | {n: getattr(self, n) for n in FOUND}

    def state_dict(self) -> dict[str, Any]:
        """All that the next step needs."""
        found: dict[str, Any] = {name: getattr(self, name) for name in FOUND}
        found |= {"predicted": self._predicted, "reached": self._reached}
        found["solution"] = [*self._solution, self._interval, self._again]
        found |= {"promised": self._promised, "usual": self._usual}
        value = first = None
        if self._damping is not None:
            value, first = self._damping.value, self._damping.first
            found["streak"] = self._damping.streak
        return {**found, "damping": value, "first": first, "written": self.written}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        for name in FOUND:  # trust was not always one of them
            setattr(self, name, float(state.get(name, 1.0)))
        self._predicted = state.get("predicted")
        self._reached = float(state.get("reached", math.inf))
        self._promised = float(state.get("promised", 0.0))
        self._usual = float(state.get("usual", 0.0))
        # of an older state: found in the next step
        x, y, interval, again = state.get("solution", (0.0, 0.0, 1, 0))
        self._solution, self._interval, self._again = (x, y), interval, again
        self.written = [(float(x), float(y)) for x, y in state["written"]]
        if self._damping is not None and state["damping"] is not None:
            self._damping.value = float(state["damping"])
            self._damping.first = float(state["first"])
            self._damping.streak = int(state.get("streak", 0))
