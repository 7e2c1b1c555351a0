"""Who owns, who works and what moves: pure data, made from shapes alone.

What a plan costs on a machine is loaded when it is first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from natgrad.plan.cost import CostModel
from natgrad.plan.exchange import EXCHANGES, Exchange, Item
from natgrad.plan.messages import Message, Wiring
from natgrad.plan.plan import Plan, make_plan
from natgrad.plan.spec import BlockSpec, StatisticSpec
from natgrad.plan.strategies import (
    PLACEMENTS,
    STRATEGIES,
    Strategy,
    find_strategy,
    hybrid,
)

if TYPE_CHECKING:
    from natgrad.plan.autotune.choice import Choice, choose_strategy
    from natgrad.plan.autotune.profile import HardwareProfile
    from natgrad.plan.autotune.profile_file import load_profile

__all__ = [
    "EXCHANGES",
    "PLACEMENTS",
    "STRATEGIES",
    "BlockSpec",
    "Choice",
    "CostModel",
    "Exchange",
    "HardwareProfile",
    "Item",
    "Message",
    "Plan",
    "StatisticSpec",
    "Strategy",
    "Wiring",
    "choose_strategy",
    "find_strategy",
    "hybrid",
    "load_profile",
    "make_plan",
]
_LATER = {
    "Choice": "choice",
    "HardwareProfile": "profile",
    "choose_strategy": "choice",
    "load_profile": "profile_file",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.autotune.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_LATER]
