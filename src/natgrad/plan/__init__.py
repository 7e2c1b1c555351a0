"""Who owns, who works and what moves: pure data, made from shapes alone."""

from natgrad.plan.choice import Choice, choose_strategy
from natgrad.plan.cost import CostModel
from natgrad.plan.exchange import EXCHANGES, Exchange, Item
from natgrad.plan.plan import Plan, make_plan
from natgrad.plan.profile import HardwareProfile
from natgrad.plan.profile_file import load_profile
from natgrad.plan.spec import BlockSpec, StatisticSpec
from natgrad.plan.strategies import (
    PLACEMENTS,
    STRATEGIES,
    Strategy,
    find_strategy,
    hybrid,
)

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
    "Plan",
    "StatisticSpec",
    "Strategy",
    "choose_strategy",
    "find_strategy",
    "hybrid",
    "load_profile",
    "make_plan",
]
