"""Learning rate and momentum of parameter groups, as the quadratic model has them."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from natgrad.math import foreach
from natgrad.quadratic.options import AUTO
from natgrad.quadratic.tuner import Tuner
from natgrad.rules.motion import Average

if TYPE_CHECKING:
    from natgrad.options import Options

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

    Args:
        optimizer: the one that has the groups.
        tuner: what finds them.
        averages: returns every parameter that is the optimizer's, with what its
            momentum is an average of.
        restart: has the passes since the last step not count.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tuner: Tuner,
        averages: Callable[[], Iterable[tuple[Tensor, Average]]],
        restart: Callable[[], None],
    ) -> None:
        self._optimizer, self._tuner = optimizer, tuner
        self._averages, self._restart = averages, restart
        tuner.written = [(float(g["lr"]), 1.0) for g in self._groups]

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
            self._take_back()
            self._restart()
            loss = tuner.evaluate(closure, optimizer.zero_grad)
        return loss

    def _last(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The last step and the weight decay, by name."""
        velocities = {id(p): v for p, v in self._velocities()}
        decays = {id(p): g["weight_decay"] for g in self._groups for p in g["params"]}
        mine = [(n, i) for i, n in self._tuner.names().items() if i in velocities]
        last = {n: velocities[i] for n, i in mine}
        return last, {n: float(decays[i]) for n, i in mine}

    def _velocities(self) -> list[tuple[Tensor, Tensor]]:
        """Our parameters, with their last change."""
        state = self._optimizer.state
        return [(p, average.velocity(state, p)) for p, average in self._averages()]

    def find(self, moves: Moves) -> None:
        """Write the rates of the coming change into the groups."""
        tuner, groups = self._tuner, self._groups
        scales = [self._scale(i) for i in range(len(groups))]
        first = scales[0] or 1.0
        parts = {id(g): s / first for g, s in zip(groups, scales, strict=True)}
        moves = [*moves]
        self._rest(moves)
        if tuner.solves:
            found = tuner.solve(*self._directions(moves, parts), scales[0])
        else:
            found = tuner.hold(scales[0])
        for group in groups:
            if tuner.finds_lr:
                group["lr"] = found[0] * parts[id(group)]
            if tuner.finds_momentum:
                group["momentum"] = found[1]
        tuner.lr, tuner.momentum = (float(groups[0][n]) for n in FIRST)
        lrs = [float(g["lr"]) for g in groups]
        tuner.written = [*zip(lrs, scales, strict=True)]

    def _rest(self, moves: Moves) -> None:
        """What has no gradient does not move now: its last change will be none."""
        moving = {id(p) for _, _, params, _ in moves for p in params}
        at_rest = [v for p, v in self._velocities() if id(p) not in moving]
        if at_rest:
            foreach.scale_(at_rest, 0.0)

    def _directions(
        self, moves: Moves, parts: dict[int, float]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
        """The update, the last step and the weight decay, by name.

        ``parts`` are the groups' parts of the learning rate, by their ids.
        """
        tuner, names, state = self._tuner, self._tuner.names(), self._optimizer.state
        update: dict[str, Tensor] = {}
        last: dict[str, Tensor] = {}
        decay: dict[str, float] = {}
        for group, average, params, updates in moves:
            lr = parts[id(group)] if tuner.finds_lr else float(group["lr"])
            momentum = 1.0 if tuner.finds_momentum else float(group["momentum"])
            for p, u in zip(params, updates, strict=True):
                name = names[id(p)]
                update[name] = u * -lr
                last[name] = average.velocity(state, p) * momentum
                decay[name] = float(group["weight_decay"])
        return update, last, decay

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
