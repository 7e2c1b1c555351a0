"""Who owns, who works and what moves: pure data, made from shapes alone.

What a plan costs on a machine is loaded when it is first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from natgrad.plan.buckets import bucket_limit, make_buckets
from natgrad.plan.cost import CostModel
from natgrad.plan.describe import size_text
from natgrad.plan.exchange import EXCHANGES, Exchange, Item
from natgrad.plan.memory import Keeps, memory_of
from natgrad.plan.messages import Message, Wiring, mine
from natgrad.plan.plan import Plan, make_plan
from natgrad.plan.sequence import Departure, Leg, departures, flat, reductions
from natgrad.plan.shards import make_crates
from natgrad.plan.spec import FLOAT_BYTES, BlockSpec, StatisticSpec
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
    "FLOAT_BYTES",
    "PLACEMENTS",
    "STRATEGIES",
    "BlockSpec",
    "Choice",
    "CostModel",
    "Departure",
    "Exchange",
    "HardwareProfile",
    "Item",
    "Keeps",
    "Leg",
    "Message",
    "Plan",
    "StatisticSpec",
    "Strategy",
    "Wiring",
    "bucket_limit",
    "choose_strategy",
    "departures",
    "find_strategy",
    "flat",
    "hybrid",
    "load_profile",
    "make_buckets",
    "make_crates",
    "make_plan",
    "memory_of",
    "mine",
    "reductions",
    "size_text",
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
