"""Polar: whitened, orthogonalised gradients at the norm of each layer's weight."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from natgrad import options
from natgrad.distributed.communicator import CommOptions
from natgrad.engine.auto import Profile
from natgrad.factors.refresh import Every, Paced, Refresh
from natgrad.plan import Strategy
from natgrad.spngd import SPNGD

DEFAULT_REFRESH = Paced(Every(statistics=5, inverses=5))


class Polar(SPNGD):
    """An optimizer for whole networks: whitened, orthogonalised, layer by layer.

    For a layer with weight w (and bias), V the running average of its gradient with
    Nesterov's look-ahead, A the second moment of its inputs, and a the mean eigenvalue
    of A::

        W W^T = (A + damping a I)^-1        a root of the damped inverse, by Cholesky
        U     = polar(V W) W^T              all singular values of V W become 1
        w    <- w - lr |w| U / |U|          a learning rate of 0.02 changes w by 2%

    This is `SPNGD` with ``statistics="inputs"``, ``scale="orthogonal"``,
    ``trust="layer"``, ``average="gradient"``, ``nesterov=True``, ``rest="adaptive"``,
    ``damping_style="relative"`` and ``subsample=None``. Biases without a weight,
    normalisation layers and parameters of unknown layers follow Adam's rule with a
    fifth of the learning rate. No gradient statistic is estimated. ::

        optimizer = natgrad.Polar(model, lr=0.1)

    Args:
        model: the module to train, or one wrapped in `DistributedDataParallel`.
        lr: learning rate, > 0: the relative change of every layer in a step. LR
            schedulers and parameter groups can change it.
        momentum: of the running average of gradients, in [0, 1).
        weight_decay: each step also takes lr times this part of the weight away;
            biases, norms and parameters without a block keep theirs.
        damping: lambda, relative to the mean eigenvalue of A: a number >= 0 or a
            function of the step.
        decay: weight of the old value in the running averages of A, in [0, 1).
        refresh: when A is estimated and inverted: `Every`, `Scheduled` or `Adaptive`.
        rest_rate: the learning rate of parameters without a block, as a part of lr.
        beta2: decay of the second moments of parameters without a block.
        param_groups: groups made of ``named_parameters``, for options of their own.
        subsample: estimate A from every k-th example; 1: from all; None: from as many
            as a layer needs (at least 64, and two vectors for each input), so that a
            refresh costs the same at any larger batch.
        largest_factor: rows that A may have; a larger one is cut into diagonal blocks,
            which `report` shows. None: never.

    As for `KFAC`: loss, accumulation, sharing, skip, grad_scaler, strategy, placement,
    profile, comm, group.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.8,
        weight_decay: float = 0.0,
        damping: options.Damping = 1.0,
        decay: float = 0.8,
        refresh: Refresh = DEFAULT_REFRESH,
        rest_rate: float = 0.2,
        beta2: float = 0.95,
        param_groups: Iterable[dict[str, Any]] | None = None,
        loss: options.Loss = "mean",
        accumulation: options.Accumulation = "mean",
        sharing: options.Sharing = "expand",
        skip: Collection[str] = (),
        subsample: int | None = None,
        largest_factor: int | None = options.LARGEST_FACTOR,
        grad_scaler: torch.amp.GradScaler | None = None,
        strategy: str | Strategy = "spngd",
        placement: str = "longest_first",
        profile: Profile | None = None,
        comm: CommOptions | None = None,
        group: Any = None,
    ) -> None:
        super().__init__(
            model,
            lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=True,
            average="gradient",
            param_groups=param_groups,
            statistics="inputs",
            scale="orthogonal",
            trust="layer",
            rest="adaptive",
            rest_rate=rest_rate,
            beta2=beta2,
            damping=damping,
            damping_style="relative",
            decay=decay,
            refresh=refresh,
            loss=loss,
            accumulation=accumulation,
            sharing=sharing,
            norm="skip",
            skip=skip,
            subsample=subsample,
            largest_factor=largest_factor,
            grad_scaler=grad_scaler,
            strategy=strategy,
            placement=placement,
            profile=profile,
            comm=comm,
            group=group,
        )
