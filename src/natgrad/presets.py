"""Optimizers that people search by name: `SPNGD` with other options."""

from typing import Any, ClassVar

from torch import nn

from natgrad.factors.refresh import Every
from natgrad.layers.split import groups
from natgrad.options import Options
from natgrad.rules.eigen_adam import EigenAdam
from natgrad.rules.fallbacks import Adam
from natgrad.rules.kronecker import Kronecker
from natgrad.rules.lengths import Free
from natgrad.rules.motion import AverageGradients, Decoupled
from natgrad.rules.muon_length import MuonLength
from natgrad.rules.orthogonal import Orthogonal
from natgrad.spngd import SPNGD


class _Preset(SPNGD):
    """Given no groups, those of `natgrad.groups`: matrices by the rule, Adam else."""

    finds_rates: ClassVar[bool] = False

    def _usual_groups(self, model: nn.Module, options: Options) -> list[dict[str, Any]]:
        return groups(model, options.rule)


class Muon(_Preset):
    """Muon (Jordan et al. 2024), and AdamW for what is no hidden matrix.

    For a matrix ``(m, n)``, M the running average of its gradient::

        w <- w - lr weight_decay w - lr 0.2 sqrt(max(m, n)) NS(M)

    where M looks ahead (Nesterov) and NS are five iterations with the published
    coefficients. As ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"`` (Liu
    et al. 2025), so that one learning rate, AdamW's, fits all groups. ::

        optimizer = natgrad.Muon(model, lr=1e-3)

    It is `SPNGD` with other options, ``Muon.defaults``, and takes the same arguments.
    torch's ``ns_coefficients`` and ``ns_steps`` are
    ``rule=Orthogonal(sides="none", iteration=((a, b, c),) * steps)``; ``adjust_lr_fn``
    is the option ``length=MuonLength(adjust=..., normalise=False)``, and ``nesterov``
    the option ``average=AverageGradients(nesterov=...)``. Without groups it takes
    `natgrad.groups` of the model.
    """

    defaults: ClassVar[Options] = Options(
        rule=Orthogonal(sides="none", iteration="muon"),
        fallback=Adam(damping=1e-8),
        length=MuonLength(adjust="match_rms_adamw", normalise=False),
        average=AverageGradients(nesterov=True),
        decay=Decoupled(),
        lr=1e-3,
        momentum=0.95,
        weight_decay=0.1,
        strategy="spngd",
    )
    """The options that hold unless others are given."""


class SOAP(_Preset):
    """SOAP (Vyas et al. 2024): Adam in the eigenbases of Shampoo's factors.

    `EigenAdam` tells what a step does, and in which order; the first one only makes the
    bases. Other parameters than hidden matrices follow Adam's rule. ::

        optimizer = natgrad.SOAP(model, lr=3e-3)

    It is `SPNGD` with other options, ``SOAP.defaults``, and takes the same arguments:
    the published ``betas`` are ``momentum`` and the ``beta2`` of the rule,
    ``shampoo_beta`` is ``factor_decay``, ``precondition_frequency=k`` is
    ``refresh=Every(1, k)``, ``eps`` is ``damping``, relative to the root mean square
    of the gradient; ``max_precondition_dim`` is the option ``largest_factor``, above
    which a factor is cut into blocks. A convolution is one matrix, outputs by all else.
    Without groups it takes `natgrad.groups` of the model.
    """

    defaults: ClassVar[Options] = Options(
        rule=EigenAdam(
            source="gradients", late=True, basis="tracked", moments="keep", beta2=0.95
        ),
        fallback=Adam(damping=1e-8),
        length=Free(),
        average=AverageGradients(),
        decay=Decoupled(),
        lr=3e-3,
        momentum=0.95,
        weight_decay=0.01,
        damping=1e-8,
        refresh=Every(statistics=1, inverses=10),
        factor_decay=0.95,
        strategy="spngd",
    )
    """The options that hold unless others are given."""


class Shampoo(_Preset):
    """Shampoo (Gupta et al. 2018), at the length of AdamW's steps.

    For a matrix ``(m, n)`` with gradient G::

        L <- L + G G^T,  R <- R + G^T G
        U  = (L + damping I)^-1/4  M  (R + damping I)^-1/4

    M is the running average of G. U gets the norm ``0.2 sqrt(m n)``, as implementations
    graft another method's length (Anil et al. 2020), so that one learning rate fits all
    groups; ``length=Free()`` is the paper's. Other parameters than hidden matrices
    follow Adam's rule. ::

        optimizer = natgrad.Shampoo(model, lr=1e-3)

    It is `SPNGD` with other options, ``Shampoo.defaults``, and takes the same
    arguments: ``preconditioning_compute_steps=k`` is ``refresh=Every(1, k)``, and
    ``matrix_eps`` is ``damping``. Without groups it takes `natgrad.groups` of the
    model.
    """

    defaults: ClassVar[Options] = Options(
        rule=Kronecker(source="gradients", power=0.25, style="whole"),
        fallback=Adam(damping=1e-8),
        length=MuonLength(adjust="match_rms_adamw"),
        average=AverageGradients(),
        decay=Decoupled(),
        lr=1e-3,
        momentum=0.9,
        damping=1e-6,
        refresh=Every(statistics=1, inverses=10),
        factor_decay=1.0,
        strategy="spngd",
    )
    """The options that hold unless others are given."""
