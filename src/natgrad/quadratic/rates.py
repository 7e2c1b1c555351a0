"""The learning rate and momentum of parameter groups, as the quadratic model has them."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from natgrad.options import Options
from natgrad.quadratic.options import AUTO
from natgrad.quadratic.tuner import Tuner

Moves = Iterable[tuple[dict[str, Any], list[Tensor], list[Tensor], list[Tensor]]]
"""Groups with parameters, their updates and their last changes."""
FIRST = {"lr": 1.0, "momentum": 0.0}
"""What a group has before the first step, so that a scheduler can begin."""


def before_first(name: str, value: Any) -> Any:
    """A number for a parameter group, also if it is to be found."""
    return FIRST[name] if value == AUTO else value


def require_no_rates(groups: Iterable[dict[str, Any]], options: Options) -> None:
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

    def __init__(self, tuner: Tuner, groups: list[dict[str, Any]]) -> None:
        self._tuner, self._groups = tuner, groups
        tuner.written = [(float(g["lr"]), 1.0) for g in groups]

    def find(self, moves: Moves, names: dict[int, str]) -> None:
        """Write the rates of the coming change into the groups."""
        tuner = self._tuner
        scales = {id(g): self._scale(i) for i, g in enumerate(self._groups)}
        update: dict[str, Tensor] = {}
        last: dict[str, Tensor] = {}
        decay: dict[str, float] = {}
        for group, params, updates, velocities in moves:
            lr = scales[id(group)] if tuner.finds_lr else float(group["lr"])
            momentum = 1.0 if tuner.finds_momentum else float(group["momentum"])
            for p, u, v in zip(params, updates, velocities, strict=True):
                name = names[id(p)]
                update[name], last[name] = u * -lr, v * momentum
                decay[name] = float(group["weight_decay"])
        found = tuner.solve(update, last, decay)
        for group in self._groups:
            if tuner.finds_lr:
                group["lr"] = found[0] * scales[id(group)]
            if tuner.finds_momentum:
                group["momentum"] = found[1]
        tuner.lr, tuner.momentum = (float(self._groups[0][n]) for n in FIRST)
        tuner.written = [(float(g["lr"]), scales[id(g)]) for g in self._groups]

    def _scale(self, i: int) -> float:
        written, scale = self._tuner.written[i]
        return scale * float(self._groups[i]["lr"]) / written if written else scale
