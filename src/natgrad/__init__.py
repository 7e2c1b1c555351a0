"""natgrad: natural-gradient training for PyTorch, from one process to many.

`KFAC` preconditions the gradients of any torch optimizer; `SPNGD` is an optimizer of
its own; `Polar` is one too, with an orthogonalised update.
"""

from natgrad import plan, schedules
from natgrad.checkpoint.momentum import take_momentum
from natgrad.diagnostics import sinks
from natgrad.distributed.communicator import CommError
from natgrad.distributed.options import CommOptions
from natgrad.factors.budget import Budget
from natgrad.factors.refresh import Adaptive, Every, Paced, Refresh, Scheduled
from natgrad.kfac import KFAC
from natgrad.layers import LayerKind, register_layer
from natgrad.layers.groups import GroupList, groups
from natgrad.math.inverse import InverseError
from natgrad.options import Options
from natgrad.plan import hybrid
from natgrad.polar import Polar
from natgrad.presets import SOAP, Muon, Shampoo, create
from natgrad.quadratic.options import AutoDamping
from natgrad.rules.eigen_adam import EigenAdam
from natgrad.rules.ekfac import EKFAC
from natgrad.rules.fallbacks import Adam, Plain
from natgrad.rules.kronecker import Kronecker
from natgrad.rules.lengths import Free, KLClip, LayerTrust, Length
from natgrad.rules.motion import (
    Average,
    AverageGradients,
    AverageUpdates,
    Coupled,
    Decay,
    Decoupled,
    FixedNorm,
    Rescaled,
)
from natgrad.rules.muon_length import MuonLength
from natgrad.rules.orthogonal import Orthogonal
from natgrad.rules.rule import Matrices, Rule
from natgrad.spngd import SPNGD

__version__ = "0.2.0"

__all__ = [
    "EKFAC",
    "KFAC",
    "SOAP",
    "SPNGD",
    "Adam",
    "Adaptive",
    "AutoDamping",
    "Average",
    "AverageGradients",
    "AverageUpdates",
    "Budget",
    "CommError",
    "CommOptions",
    "Coupled",
    "Decay",
    "Decoupled",
    "EigenAdam",
    "Every",
    "FixedNorm",
    "Free",
    "GroupList",
    "InverseError",
    "KLClip",
    "Kronecker",
    "LayerKind",
    "LayerTrust",
    "Length",
    "Matrices",
    "Muon",
    "MuonLength",
    "Options",
    "Orthogonal",
    "Paced",
    "Plain",
    "Polar",
    "Refresh",
    "Rescaled",
    "Rule",
    "Scheduled",
    "Shampoo",
    "create",
    "groups",
    "hybrid",
    "plan",
    "register_layer",
    "schedules",
    "sinks",
    "take_momentum",
]
