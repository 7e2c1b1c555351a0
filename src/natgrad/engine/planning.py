"""Which plan an engine follows: as it was told, chosen, or by what was measured."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from natgrad.distributed.communicator import world_of
from natgrad.engine.auto import AUTO, Automatic
from natgrad.layers import Block
from natgrad.options import Options
from natgrad.plan import PLACEMENTS, Plan, Strategy, make_plan
from natgrad.requiring import require_choice

MEASURED = "measured"


class Planning:
    """Makes the plan, again when more is known.

    Attributes:
        auto: of ``strategy="auto"``, the choice.
        measures: whether seconds of inversions are wanted, to place them by.
        seconds: those that owners were placed by; empty before.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        options: Options,
        *,
        gradients: str,
        device: torch.device,
    ) -> None:
        strategy, placement, group = options.strategy, options.placement, options.group
        if not isinstance(strategy, str | Strategy):
            raise TypeError(
                f"Invalid strategy={strategy!r}. Must be a name, or hybrid."
            )
        require_choice("placement", placement, (*PLACEMENTS, MEASURED))
        self.measures = placement == MEASURED and world_of(group) > 1
        self.seconds: dict[str, float] = {}
        given = self._make = partial(
            make_plan,
            [b.spec for b in blocks],
            world=world_of(group),
            strategy=strategy,
            placement="longest_first" if placement == MEASURED else placement,
            gradients=gradients,
            inverse="eigen" if options.rule.form == "eigen" else "factored",
        )
        self.auto: Automatic | None = None
        if strategy == AUTO:
            self.auto = Automatic(given, model, options, device)
            self._make = partial(self.auto.make_plan)

    def plan(self) -> Plan:
        """The plan by what is known now."""
        return self._make(costs=self.seconds) if self.seconds else self._make()

    def plan_for_ddp(self) -> Plan:
        """From now on DDP averages gradients."""
        self._make = partial(self._make, gradients="ddp")
        return self.plan()

    def plan_by(self, seconds: Mapping[str, float]) -> Plan:
        """From now on owners are those that these seconds of inversions give."""
        self.measures, self.seconds = False, dict(seconds)
        return self.plan()

    def saved_seconds(self, state: Any, statistics: Mapping[str, Any]) -> Any:
        """Of a saved part: the seconds that its owners came from; None if not known.

        A run that measures has other owners after it than before.
        """
        if not (self.measures and isinstance(state, Mapping)) or not state.get("part"):
            return None
        seconds: Any = state.get("seconds")
        if not isinstance(seconds, Mapping) or set(seconds) != set(statistics):
            return None
        known = all(isinstance(x, float) and math.isfinite(x) for x in seconds.values())
        return seconds if known else None
