"""natgrad: natural-gradient training for PyTorch, from one process to many.

`KFAC` preconditions the gradients of any torch optimizer; `SPNGD` is an optimizer of
its own; `Polar` is one too, with an orthogonalised update.
"""

from natgrad import plan, schedules
from natgrad.diagnostics import sinks
from natgrad.distributed.communicator import CommOptions
from natgrad.factors.budget import Budget
from natgrad.factors.refresh import Adaptive, Every, Paced, Refresh, Scheduled
from natgrad.kfac import KFAC
from natgrad.layers import LayerKind, register_layer
from natgrad.plan import hybrid
from natgrad.polar import Polar
from natgrad.spngd import SPNGD

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "SPNGD",
    "Adaptive",
    "Budget",
    "CommOptions",
    "Every",
    "LayerKind",
    "Paced",
    "Polar",
    "Refresh",
    "Scheduled",
    "hybrid",
    "plan",
    "register_layer",
    "schedules",
    "sinks",
]
