"""KFAC: a gradient preconditioner for any torch optimizer."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad import config
from natgrad.comm import CommOptions
from natgrad.config import Curvature, require_number
from natgrad.engine import Engine
from natgrad.math.precondition import kl_scale
from natgrad.optimizer_state import travel_with
from natgrad.plan import Strategy
from natgrad.refresh import Every, Refresh
from natgrad.users import Inspectable

DEFAULT_REFRESH = Every(statistics=10, inverses=100)


class KFAC(Inspectable):
    """Precondition a model's gradients with K-FAC (Pauloski et al. 2020).

    With an optimizer, gradients are preconditioned inside ``optimizer.step()`` and the
    state travels in ``optimizer.state_dict()``: the training loop stays as it is. ::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        natgrad.KFAC(model, optimizer)

    Without one, call `step` between ``loss.backward()`` and ``optimizer.step()``.
    Parameters that belong to no known layer keep their plain gradient; `report` says
    which and why.

    Args:
        model: a module, or one wrapped in `DistributedDataParallel`.
        optimizer: any torch optimizer over the model's parameters.
        damping: lambda, added to the Fisher; a number >= 0 or a function of the step.
        damping_style: ``"eigen"`` (exact: eq. 13-15) or ``"factored"`` (pi-split and
            Cholesky: SP-NGD, eq. 12; cheaper to refresh).
        decay: weight of the old value in the running averages (eq. 16-17), in [0, 1).
        kl_clip: kappa of eq. 18, > 0; None turns it off.
        lr: the learning rate for the KL clip when there is no optimizer to read.
        refresh: `Every`, `Scheduled` or `Adaptive`.
        fisher: ``"empirical"``, or ``"sampled"`` with `sampled_backward` in the loop.
        loss: whether the loss is a ``"mean"`` or ``"sum"`` over examples, or a mean
            over ``"tokens"`` (examples and positions).
        accumulation: whether losses of k micro-batches were divided by k (``"mean"``)
            or not (``"sum"``).
        sharing: ``"expand"`` or ``"reduce"``: linear layers with more than two dims.
        norm: blocks of normalisation layers: ``"skip"``, ``"unit"``, ``"diag"`` or
            ``"full"``.
        norm_damping_ratio: multiplies the damping of normalisation layers.
        skip: names of layers, or of modules that contain them, to leave out.
        subsample: estimate statistics from every k-th example only; 1 uses all.
        grad_scaler: the `torch.amp.GradScaler` in use, to undo its loss scale.
        strategy: how several ranks share the work: ``"factor_wise"``,
            ``"layer_wise"``, ``"spngd"`` or ``natgrad.hybrid(fraction)``.
        placement: ``"longest_first"`` (by modelled cost), ``"measured"`` (the same, and
            anew after the first refresh by the seconds that its inversions took) or
            ``"round_robin"`` (the papers').
        comm: buckets, precision and overlap of communication.
        group: a process group; the default one if None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        damping: config.Damping = 1e-3,
        damping_style: config.DampingStyle = "eigen",
        decay: float = 0.95,
        kl_clip: float | None = 1e-3,
        lr: float | None = None,
        refresh: Refresh = DEFAULT_REFRESH,
        fisher: config.Fisher = "empirical",
        loss: config.Loss = "mean",
        accumulation: config.Accumulation = "mean",
        sharing: config.Sharing = "expand",
        norm: config.Norm = "skip",
        norm_damping_ratio: float = 1.0,
        skip: Collection[str] = (),
        subsample: int = 1,
        grad_scaler: torch.amp.GradScaler | None = None,
        strategy: str | Strategy = "factor_wise",
        placement: str = "longest_first",
        comm: CommOptions | None = None,
        group: Any = None,
    ) -> None:
        if kl_clip is not None:
            require_number("kl_clip", kl_clip, "a number > 0, or None", above=0.0)
        if lr is not None:
            require_number("lr", lr, "a number > 0", above=0.0)
        if kl_clip is not None and optimizer is None and lr is None:
            raise ValueError(
                f"kl_clip={kl_clip} needs the learning rate: give an optimizer or lr=, "
                "or kl_clip=None."
            )
        self.kl_clip, self.lr = kl_clip, lr
        self.optimizer = optimizer
        curvature = Curvature(
            damping=damping,
            damping_style=damping_style,
            decay=decay,
            refresh=refresh,
            fisher=fisher,
            loss=loss,
            accumulation=accumulation,
            sharing=sharing,
            norm=norm,
            norm_damping_ratio=norm_damping_ratio,
            skip=skip,
            subsample=subsample,
        )
        self.engine = Engine(
            model,
            curvature,
            strategy=strategy,
            placement=placement,
            comm=comm or CommOptions(),
            group=group,
            grad_scaler=grad_scaler,
        )
        self._handles: list[Any] = []
        if optimizer is not None:
            hook = optimizer.register_step_pre_hook(self._before_step)
            self._handles = [hook, *travel_with(optimizer, self)]

    def _before_step(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Precondition; given a closure, as Lightning does, each time it has run."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.step()
            return None

        def preconditioned() -> Any:
            loss = closure()
            self.step()
            return loss

        return args[:1], {**kwargs, "closure": preconditioned}

    @torch.no_grad()
    def step(self) -> None:
        """Replace the gradients by preconditioned ones (Pauloski et al., Algorithm 1).

        If a gradient on any rank is not finite, all gradients are set to None, so that
        the optimizer skips the step, and the statistics stay as they were.
        """
        engine = self.engine
        with engine.attempt():
            captured, sums = engine.reduce_statistics()
            gradients = engine.reduce_gradients()
            verdict = engine.agree(captured)
            if not verdict.finite:
                engine.skip_step()
                return
            engine.refresh(sums, verdict)
            updates = engine.precondition(gradients, verdict.present)
            scale = self._kl_scale(gradients, updates)
            shared = engine.share(updates, verdict.present)
            engine.write_gradients(updates | shared, scale)
            engine.end()

    def _kl_scale(
        self, gradients: dict[str, Tensor], updates: dict[str, Tensor]
    ) -> Tensor | None:
        """nu of eq. 18; None when there is no clip."""
        if self.kl_clip is None:
            return None
        products = [
            torch.dot(updates[name].flatten(), gradients[name].flatten()).abs()
            for name in updates
            if self.engine.block[name].kind is not None
            # several ranks may work on a block: the first counts it
            and self.engine.plan.workers[name][0] == self.engine.comm.rank
        ]
        zero = self.engine.like.new_zeros(1)
        total = self.engine.comm.agree(sum(products, start=zero))[0]
        return kl_scale(total, self.kl_clip, self._learning_rate())

    def _learning_rate(self) -> float:
        if self.optimizer is None:
            assert self.lr is not None
            return self.lr
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def close(self) -> None:
        """Remove every hook from the model and the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.engine.close()
