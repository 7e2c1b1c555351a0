"""Learning rate and momentum of parameter groups, as the quadratic model has them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from natgrad.math import foreach
from natgrad.quadratic.options import AUTO
from natgrad.quadratic.tuner import Lambda, Tuner, refuse_scaler
from natgrad.rules.motion import Average

if TYPE_CHECKING:
    from natgrad.options import Options
    from natgrad.spngd import SPNGD

Moves = Iterable[tuple[dict[str, Any], Average, list[Tensor], list[Tensor]]]
"""Groups with what their momentum is an average of, parameters and updates."""
FIRST = {"lr": 1.0, "momentum": 0.0}
"""What a group has before the first step, so that a scheduler can begin."""


def before_first(name: str, value: Any) -> Any:
    """A number for a parameter group, also if it is to be found."""
    return FIRST[name] if value == AUTO else value


def require_no_rates(groups: Iterable[dict[str, Any]], options: "Options") -> None:
    """Raise if a group has a rate of its own that is found for all of them."""
    for name in FIRST:
        if getattr(options, name) != AUTO:
            continue
        for group in groups:
            if group.get(name, AUTO) != AUTO:
                raise ValueError(
                    f"Invalid {name}={group[name]!r} of a parameter group beside "
                    f"{name}='auto', which is found for all groups: must not be given."
                )
            group.pop(name, None)


class Rates:
    """Finds one learning rate and one momentum for all groups of an optimizer.

    A group's ``lr`` is what was found times its scale, which begins with 1. A scheduler
    that multiplies ``lr`` multiplies the scale.
    """

    def __init__(
        self,
        optimizer: "SPNGD",
        options: "Options",
        damping: Lambda | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        if scaler is not None:
            refuse_scaler()
        self._optimizer = optimizer
        self._tuner = Tuner(optimizer.engine, options, damping)
        self._tuner.written = [(float(g["lr"]), 1.0) for g in self._groups]
        optimizer.engine.tuner = self._tuner

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups  # another list after a state was loaded

    def evaluate(self, closure: Any) -> Tensor:
        """Run closures and their backwards: see `Tuner.evaluate`.

        If a last step whose learning rate was found turns out to be bad for this batch
        it is taken back, and they run once more.
        """
        optimizer, tuner = self._optimizer, self._tuner
        loss = tuner.evaluate(closure, optimizer.zero_grad)
        if tuner.finds_lr and tuner.regrets(*self._last()):
            tuner.fail()
            self._take_back()
            optimizer.engine.restart()
            loss = tuner.evaluate(closure, optimizer.zero_grad)
        return loss

    def _last(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The last step and the weight decay, by name."""
        velocities = {id(p): v for p, v in self._velocities()}
        decays = {id(p): g["weight_decay"] for g in self._groups for p in g["params"]}
        named = self._optimizer.engine.model.named_parameters()
        mine = [(n, id(p)) for n, p in named if id(p) in velocities]
        last = {n: velocities[i] for n, i in mine}
        return last, {n: float(decays[i]) for n, i in mine}

    def _velocities(self) -> list[tuple[Tensor, Tensor]]:
        """Our parameters, with their last change."""
        engine, state = self._optimizer.engine, self._optimizer.state
        return [
            (p, engine.parts[block.name].average.velocity(state, p))
            for block in engine.blocks
            for p in (() if block.is_foreign else block.parameters)
        ]

    def find(self, moves: Moves) -> None:
        """Write the rates of the coming change into the groups."""
        tuner, state = self._tuner, self._optimizer.state
        scales = [self._scale(i) for i in range(len(self._groups))]
        first = scales[0] or 1.0
        parts = {id(g): s / first for g, s in zip(self._groups, scales, strict=True)}
        named = self._optimizer.engine.model.named_parameters()
        names = {id(p): name for name, p in named}
        update: dict[str, Tensor] = {}
        last: dict[str, Tensor] = {}
        decay: dict[str, float] = {}
        for group, average, params, updates in moves:
            velocities = [average.velocity(state, p) for p in params]
            lr = parts[id(group)] if tuner.finds_lr else float(group["lr"])
            momentum = 1.0 if tuner.finds_momentum else float(group["momentum"])
            for p, u, v in zip(params, updates, velocities, strict=True):
                name = names[id(p)]
                update[name], last[name] = u * -lr, v * momentum
                decay[name] = float(group["weight_decay"])
        # what has no gradient does not move now: its last change will be none
        at_rest = [v for p, v in self._velocities() if names[id(p)] not in last]
        if at_rest:
            foreach.scale_(at_rest, 0.0)
        found = tuner.solve(update, last, decay, scales[0])
        for group in self._groups:
            if tuner.finds_lr:
                group["lr"] = found[0] * parts[id(group)]
            if tuner.finds_momentum:
                group["momentum"] = found[1]
        tuner.lr, tuner.momentum = (float(self._groups[0][n]) for n in FIRST)
        lrs = [float(g["lr"]) for g in self._groups]
        tuner.written = [*zip(lrs, scales, strict=True)]

    def judge(self) -> None:
        """Let damping follow; take a step back that made the objective worse.

        Only steps of a learning rate that was found: a number is the user's.
        """
        if not self._tuner.judge():
            self._take_back()

    def skipped(self) -> None:
        """This step's gradients are not finite: the last step was too long."""
        self._tuner.fail()
        self._take_back()

    def _take_back(self) -> None:
        if self._tuner.finds_lr:
            params, velocities = zip(*self._velocities(), strict=True)
            foreach.add_(params, velocities, -1)
            foreach.scale_(velocities, 0.0)

    def _scale(self, i: int) -> float:
        written, scale = self._tuner.written[i]
        return scale * float(self._groups[i]["lr"]) / written if written else scale
