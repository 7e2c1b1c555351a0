"""Published optimizers by their names: `SPNGD` with other options."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from natgrad import options as o
from natgrad.factors.refresh import Every, Refresh
from natgrad.layers.groups import groups as usual_groups
from natgrad.math.polar import MUON, Quintic
from natgrad.options import NOT_GIVEN, NotGiven, Options, given
from natgrad.plan import Strategy
from natgrad.polar import Polar
from natgrad.requiring import require_count
from natgrad.rules.eigen_adam import EigenAdam
from natgrad.rules.fallbacks import Adam
from natgrad.rules.kronecker import Kronecker
from natgrad.rules.lengths import Free
from natgrad.rules.motion import AverageGradients, Decoupled
from natgrad.rules.muon_length import Adjust, MuonLength
from natgrad.rules.orthogonal import Orthogonal
from natgrad.rules.rule import Rule
from natgrad.spngd import SPNGD


class _Preset(SPNGD):
    """Given no groups, those of `natgrad.groups`: matrices by the rule, Adam else."""

    finds_rates: ClassVar[bool] = False

    def _usual_groups(self, model: nn.Module, options: Options) -> list[dict[str, Any]]:
        return usual_groups(model, options.rule)


def _made(value: Any, make: Callable[[Any], Any]) -> Any:
    """What a published argument stands for here, if it is given."""
    return value if isinstance(value, NotGiven) else make(value)


def _either(name: str, ours: Any, alias: str, theirs: Any) -> Any:
    """What our argument says, or the published one; raises if both say something."""
    if isinstance(theirs, NotGiven):
        return ours
    if not isinstance(ours, NotGiven):
        raise ValueError(
            f"Invalid {name}={ours!r} with {alias}: both say the same thing. Must be "
            "one of them."
        )
    return theirs


def _interval(
    refresh: Refresh | NotGiven, name: str, every: int | NotGiven
) -> Refresh | NotGiven:
    """Statistics in every step, inverses or bases every so many."""
    if not isinstance(every, NotGiven):
        require_count(name, every)
    return _either("refresh", refresh, name, _made(every, lambda k: Every(1, k)))


class Muon(_Preset):
    """Muon (Jordan et al. 2024); AdamW for all but hidden matrices.

    For a matrix ``(m, n)``, M the running average of its gradient::

        w <- w - lr weight_decay w - lr 0.2 sqrt(max(m, n)) NS(M)

    where M looks ahead (Nesterov) and NS are five iterations with the published
    coefficients. As ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"`` (Liu
    et al. 2025), so that one learning rate, AdamW's, fits all groups. ::

        optimizer = natgrad.Muon(model, lr=1e-3)

    It is `SPNGD` with other options, ``Muon.defaults``, and takes the same arguments.
    Those of ``torch.optim.Muon`` are taken too: ``ns_coefficients`` and ``ns_steps``
    are ``rule=Orthogonal(sides="none", iteration=((a, b, c),) * steps)``;
    ``adjust_lr_fn`` is the option ``length=MuonLength(adjust=..., normalise=False)``,
    and ``nesterov`` the option ``average=AverageGradients(nesterov=...)``. Without
    groups it takes `natgrad.groups` of the model.
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

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[dict[str, Any]] | None = None,
        *,
        nesterov: bool | NotGiven = NOT_GIVEN,
        ns_coefficients: Quintic | NotGiven = NOT_GIVEN,
        ns_steps: int | NotGiven = NOT_GIVEN,
        adjust_lr_fn: Adjust | NotGiven = NOT_GIVEN,
        lr: float | NotGiven = NOT_GIVEN,
        momentum: float | NotGiven = NOT_GIVEN,
        weight_decay: float | NotGiven = NOT_GIVEN,
        rule: Rule | NotGiven = NOT_GIVEN,
        damping: o.Damping | NotGiven = NOT_GIVEN,
        refresh: Refresh | NotGiven = NOT_GIVEN,
        loss: o.Loss | NotGiven = NOT_GIVEN,
        strategy: str | Strategy | NotGiven = NOT_GIVEN,
        grad_scaler: torch.amp.GradScaler | None = None,
        options: Options | NotGiven = NOT_GIVEN,
    ) -> None:
        chosen = given(
            self.defaults,
            options,
            average=_made(nesterov, lambda x: AverageGradients(nesterov=x)),
            length=_made(adjust_lr_fn, lambda x: MuonLength(adjust=x, normalise=False)),
        )
        quintic = MUON[0] if isinstance(ns_coefficients, NotGiven) else ns_coefficients
        count = len(MUON) if isinstance(ns_steps, NotGiven) else ns_steps
        if (quintic, count) != (MUON[0], len(MUON)):
            require_count("ns_steps", count)
            iteration = (tuple(quintic),) * count
            theirs = Orthogonal(sides="none", iteration=iteration)  # pyright: ignore[reportArgumentType]
            rule = _either("rule", rule, "ns_coefficients or ns_steps", theirs)
        super().__init__(
            model,
            groups,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            rule=rule,
            damping=damping,
            refresh=refresh,
            loss=loss,
            strategy=strategy,
            grad_scaler=grad_scaler,
            options=chosen,
        )


_SOAP = EigenAdam(
    source="gradients", late=True, basis="tracked", moments="keep", beta2=0.95
)


class SOAP(_Preset):
    """SOAP (Vyas et al. 2024): Adam in the eigenbases of Shampoo's factors.

    `EigenAdam` tells what a step does, and in which order; the first one only makes the
    bases. Other parameters than hidden matrices follow Adam's rule. ::

        optimizer = natgrad.SOAP(model, lr=3e-3)

    It is `SPNGD` with other options, ``SOAP.defaults``, and takes the same arguments,
    and the published ones: ``betas`` are ``momentum`` and the ``beta2`` of the rule,
    ``shampoo_beta`` is ``factor_decay``, ``precondition_frequency=k`` is
    ``refresh=Every(1, k)``, ``eps`` is ``damping``, relative to the root mean square
    of the gradient; ``max_precondition_dim`` is the option ``largest_factor``, above
    which a factor is cut into blocks. A convolution is one matrix, outputs by all else.
    Without groups it takes `natgrad.groups` of the model.
    """

    defaults: ClassVar[Options] = Options(
        rule=_SOAP,
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

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[dict[str, Any]] | None = None,
        *,
        betas: tuple[float, float] | NotGiven = NOT_GIVEN,
        shampoo_beta: float | NotGiven = NOT_GIVEN,
        precondition_frequency: int | NotGiven = NOT_GIVEN,
        eps: float | NotGiven = NOT_GIVEN,
        lr: float | NotGiven = NOT_GIVEN,
        momentum: float | NotGiven = NOT_GIVEN,
        weight_decay: float | NotGiven = NOT_GIVEN,
        rule: Rule | NotGiven = NOT_GIVEN,
        damping: o.Damping | NotGiven = NOT_GIVEN,
        refresh: Refresh | NotGiven = NOT_GIVEN,
        loss: o.Loss | NotGiven = NOT_GIVEN,
        strategy: str | Strategy | NotGiven = NOT_GIVEN,
        grad_scaler: torch.amp.GradScaler | None = None,
        options: Options | NotGiven = NOT_GIVEN,
    ) -> None:
        chosen = given(self.defaults, options, factor_decay=shampoo_beta)
        first = _made(betas, lambda x: x[0])
        adam = _made(betas, lambda x: replace(_SOAP, beta2=x[1]))
        momentum = _either("momentum", momentum, "betas", first)
        rule = _either("rule", rule, "betas", adam)
        refresh = _interval(refresh, "precondition_frequency", precondition_frequency)
        damping = _either("damping", damping, "eps", eps)
        super().__init__(
            model,
            groups,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            rule=rule,
            damping=damping,
            refresh=refresh,
            loss=loss,
            strategy=strategy,
            grad_scaler=grad_scaler,
            options=chosen,
        )


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
    arguments, and two public ones: ``preconditioning_compute_steps=k`` is
    ``refresh=Every(1, k)``, and ``matrix_eps`` is ``damping``. Without groups it takes
    `natgrad.groups` of the model.
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

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[dict[str, Any]] | None = None,
        *,
        preconditioning_compute_steps: int | NotGiven = NOT_GIVEN,
        matrix_eps: float | NotGiven = NOT_GIVEN,
        lr: float | NotGiven = NOT_GIVEN,
        momentum: float | NotGiven = NOT_GIVEN,
        weight_decay: float | NotGiven = NOT_GIVEN,
        rule: Rule | NotGiven = NOT_GIVEN,
        damping: o.Damping | NotGiven = NOT_GIVEN,
        refresh: Refresh | NotGiven = NOT_GIVEN,
        loss: o.Loss | NotGiven = NOT_GIVEN,
        strategy: str | Strategy | NotGiven = NOT_GIVEN,
        grad_scaler: torch.amp.GradScaler | None = None,
        options: Options | NotGiven = NOT_GIVEN,
    ) -> None:
        name, every = "preconditioning_compute_steps", preconditioning_compute_steps
        refresh = _interval(refresh, name, every)
        damping = _either("damping", damping, "matrix_eps", matrix_eps)
        super().__init__(
            model,
            groups,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            rule=rule,
            damping=damping,
            refresh=refresh,
            loss=loss,
            strategy=strategy,
            grad_scaler=grad_scaler,
            options=options,
        )


NAMES: dict[str, type[SPNGD]] = {
    kind.__name__.lower(): kind for kind in (Polar, SPNGD, Muon, SOAP, Shampoo)
}
"""What `create` knows."""


def create(
    name: str,
    model: nn.Module,
    groups: Iterable[dict[str, Any]] | None = None,
    *,
    lr: float | o.Auto | NotGiven = NOT_GIVEN,
    momentum: float | o.Auto | NotGiven = NOT_GIVEN,
    weight_decay: float | NotGiven = NOT_GIVEN,
    rule: Rule | NotGiven = NOT_GIVEN,
    damping: o.Damping | o.AutoDamping | o.Auto | NotGiven = NOT_GIVEN,
    refresh: Refresh | NotGiven = NOT_GIVEN,
    loss: o.Loss | NotGiven = NOT_GIVEN,
    strategy: str | Strategy | NotGiven = NOT_GIVEN,
    grad_scaler: torch.amp.GradScaler | None = None,
    options: Options | NotGiven = NOT_GIVEN,
) -> SPNGD:
    """An optimizer by its name, for scripts that read it from a configuration. ::

        optimizer = natgrad.create("polar", model, lr=0.03)

    Args:
        name: ``"polar"``, ``"spngd"``, ``"muon"``, ``"soap"`` or ``"shampoo"``, in
            upper or lower case.
        model: the network, as for the class of that name.
        groups: parameter groups, as for the class; so are all other arguments. What is
            not given is the class's default.

    Returns:
        ``natgrad.Polar(model, ...)`` for ``"polar"``, and so on.
    """
    kind = NAMES.get(name.lower())
    if kind is None:
        legal = ", ".join(map(repr, NAMES))
        raise ValueError(
            f"Invalid name={name!r}. Must be one of {legal}. K-FAC has no name here: "
            "natgrad.KFAC(model, optimizer) is added to an optimizer that you have."
        )
    return kind(
        model,
        groups,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        rule=rule,
        damping=damping,
        refresh=refresh,
        loss=loss,
        strategy=strategy,
        grad_scaler=grad_scaler,
        options=options,
    )
