"""KFAC: a gradient preconditioner for any torch optimizer."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad import options
from natgrad.capture.hooks import as_written
from natgrad.checkpoint.optimizer_state import require_free, travel_with
from natgrad.checkpoint.sharded import only_initialises
from natgrad.distributed.communicator import CommOptions
from natgrad.engine.auto import Profile
from natgrad.engine.engine import Engine
from natgrad.engine.users import Inspectable
from natgrad.factors.refresh import Every, Paced, Refresh
from natgrad.layers import Block
from natgrad.layers.registration import require_known
from natgrad.options import Curvature, require_number, style_for, trust_for
from natgrad.plan import Strategy
from natgrad.rules.lengths import kl_trust, layer_trust

DEFAULT_REFRESH = Paced(Every(statistics=10, inverses=100))


class KFAC(Inspectable):
    """Precondition a model's gradients with K-FAC (Pauloski et al. 2020).

    With an optimizer, gradients are preconditioned inside ``optimizer.step()`` and the
    state travels in ``optimizer.state_dict()``: the training loop stays as it is. ::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        natgrad.KFAC(model, optimizer)

    Without one, call `step` between ``loss.backward()`` and ``optimizer.step()``.
    Parameters that belong to no known layer, and layers that the optimizer does not
    have, keep their plain gradient; `report` says which and why.

    Args:
        model: a module, or one wrapped in `DistributedDataParallel`.
        optimizer: any torch optimizer over the model's parameters.
        statistics: ``"both"`` A and G, or only the ``"inputs"`` (A) or ``"outputs"``
            (G): what is left out is not estimated, sent or inverted.
        scale: how they scale a gradient: ``"kronecker"`` (the papers'),
            ``"corrected"`` (EKFAC), ``"adaptive"`` (Adam in their eigenbases) or
            ``"orthogonal"`` (the polar factor of the whitened gradient).
        whitening: ``"half"`` or ``"full"``, of ``scale="orthogonal"``.
        basis: eigenbases made anew (``"exact"``), or ``"tracked"``: brought up to date
            by one step of orthogonal iteration, which is cheaper and lags behind.
        moments: when a refresh replaces eigenbases, ``"move"`` second moments into the
            new ones, or ``"restart"`` them (``"corrected"`` and ``"adaptive"``).
        trust: ``"kl"`` (clip all updates by their KL divergence: eq. 18), ``"layer"``
            (give each layer's update the norm of its weight, as LARS) or ``"none"``.
            None: ``"kl"`` for natural gradients, ``"layer"`` for the two other scales.
        kl_clip: kappa of eq. 18, > 0, with ``trust="kl"``; None turns it off.
        rest: parameters without a block: ``"plain"`` or ``"adaptive"`` (Adam's root).
        rest_rate: multiplies the ``"adaptive"`` updates of those, > 0.
        beta2: decay of the second moments of adaptive rules, in [0, 1).
        damping: lambda, added to the Fisher; a number >= 0 or a function of the step.
        damping_style: ``"eigen"`` (exact: eq. 13-15) or ``"factored"`` (pi-split and
            Cholesky: SP-NGD, eq. 12; cheaper to refresh), or ``"relative"``: lambda
            times its mean eigenvalue is added to each factor. None: ``"eigen"``, but
            ``"relative"`` where ``"orthogonal"`` whitens both sides.
        decay: weight of the old value in the running averages (eq. 16-17), in [0, 1).
        lr: the learning rate for the KL clip when there is no optimizer to read.
        refresh: `Every`, `Scheduled`, `Adaptive` or `Budget`.
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
        subsample: estimate statistics from every k-th example only; 1 uses all, None as
            many as each layer needs, however large the batch.
        largest_factor: rows that A or G may have; larger ones are cut into diagonal
            blocks, which `report` shows. None: never, as in the papers.
        grad_scaler: the `torch.amp.GradScaler` in use, to undo its loss scale.
        strategy: how several ranks share the work: ``"factor_wise"``,
            ``"layer_wise"``, ``"spngd"``, ``natgrad.hybrid(fraction)``, or ``"auto"``:
            the one that the machine's profile says is fastest, printed with why and
            with its predicted overhead over SGD, and kept in ``choice``.
        placement: ``"longest_first"`` (by modelled cost), ``"measured"`` (the same, and
            anew after the first refresh by the seconds that its inversions took) or
            ``"round_robin"`` (the papers').
        profile: the machine for ``"auto"``: a `natgrad.plan.HardwareProfile` or its
            file. None: the file that ``$NATGRAD_PROFILE`` names, that which ``natgrad
            calibrate`` wrote, or else built-in numbers.
        comm: buckets, precision and overlap of communication.
        group: a process group; the default one if None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        statistics: options.Sides = "both",
        scale: options.Scale = "kronecker",
        whitening: options.Whitening = "half",
        basis: options.Basis = "exact",
        moments: options.MovedMoments = "move",
        trust: options.Trust | None = None,
        kl_clip: float | None = 1e-3,
        rest: options.Rest = "plain",
        rest_rate: float = 1.0,
        beta2: float = 0.95,
        damping: options.Damping = 1e-3,
        damping_style: options.DampingStyle | None = None,
        decay: float = 0.95,
        lr: float | None = None,
        refresh: Refresh = DEFAULT_REFRESH,
        fisher: options.Fisher = "empirical",
        loss: options.Loss = "mean",
        accumulation: options.Accumulation = "mean",
        sharing: options.Sharing = "expand",
        norm: options.Norm = "skip",
        norm_damping_ratio: float = 1.0,
        skip: Collection[str] = (),
        subsample: int | None = 1,
        largest_factor: int | None = options.LARGEST_FACTOR,
        grad_scaler: torch.amp.GradScaler | None = None,
        strategy: str | Strategy = "factor_wise",
        placement: str = "longest_first",
        profile: Profile | None = None,
        comm: CommOptions | None = None,
        group: Any = None,
    ) -> None:
        if lr is not None:
            require_number("lr", lr, "a number > 0", above=0.0)
        require_free(optimizer)
        self.lr = lr
        self.optimizer = optimizer
        curvature = Curvature(
            statistics=statistics,
            scale=scale,
            whitening=whitening,
            basis=basis,
            moments=moments,
            trust=trust_for(trust, scale, "kl"),
            kl_clip=kl_clip,
            rest=rest,
            rest_rate=rest_rate,
            beta2=beta2,
            damping=damping,
            damping_style=style_for(damping_style, scale, statistics, "eigen"),
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
            largest_factor=largest_factor,
        )
        clips = curvature.trust == "kl" and kl_clip is not None
        if clips and optimizer is None and lr is None:
            raise ValueError(
                f"kl_clip={kl_clip} needs the learning rate: give an optimizer or lr=, "
                "or kl_clip=None."
            )
        self.engine: Engine = Engine(
            model,
            curvature,
            strategy=strategy,
            placement=placement,
            profile=profile,
            comm=comm or CommOptions(),
            group=group,
            grad_scaler=grad_scaler,
            trained=None if optimizer is None else _parameters_of(optimizer),
            optimizer=optimizer,
            rule={"lr": lr, "optimizer": type(optimizer).__name__},
        )
        self._handles: list[Any] = []
        if self.engine.own_gradients:
            self.engine.capture.on_forward = self.engine.look_for_ddp
        if optimizer is not None:
            # also inside a compiled optimizer.step
            handle = optimizer.register_step_pre_hook(as_written(self._before_step))
            self._handles = [handle, *travel_with(optimizer, self.engine)]

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
        groups = self.optimizer.param_groups if self.optimizer else [{"lr": 1.0}]
        if only_initialises(engine, groups):
            return
        with engine.attempt():
            if engine.own_gradients:  # else DDP, or nobody, must average them
                require_known(engine.model, engine.blocks)
            captured, sums = engine.reduce_statistics()
            unit = self._gradient_scale()
            gradients = engine.reduce_gradients()
            verdict = engine.agree(captured)
            if not verdict.finite:
                engine.skip_step()
                return
            engine.refresh(sums, verdict)
            gradients = verdict.among(gradients)
            if unit is not None:
                gradients = {name: g / unit for name, g in gradients.items()}
            updates = engine.precondition(gradients, gradients)
            updates = layer_trust(engine, updates, gradients)
            clip = kl_trust(engine, gradients, updates, self._learning_rate())
            shared = engine.share(updates, verdict.present)
            self._write_gradients(updates | shared, clip, unit)
            engine.end()

    def _gradient_scale(self) -> Tensor | None:
        """What gradients are still multiplied by: fused optimizers divide it out.

        Its `GradScaler` leaves that to such an optimizer, inside its step.
        """
        return getattr(self.optimizer, "grad_scale", None)

    def _write_gradients(
        self, updates: dict[str, Tensor], clip: Tensor | None, unit: Tensor | None
    ) -> None:
        """Put updates into ``.grad``, in its unit; plain blocks are not clipped."""
        for name, update in updates.items():
            block = self.engine.block[name]
            if block.kind is not None:
                block.write_gradient(update, _product(clip, unit))
            elif self.engine.own_gradients or self._changes(block):
                block.write_gradient(update, unit)

    def _changes(self, block: Block) -> bool:
        return self.engine.config.rest != "plain" and not block.is_foreign

    def _learning_rate(self) -> float:
        """For the KL clip."""
        if self.optimizer is None:
            return self.lr or 1.0
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def close(self) -> None:
        """Remove every hook from the model and the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.engine.close()


def _product(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x * y


def _parameters_of(optimizer: Optimizer) -> frozenset[int]:
    groups = optimizer.param_groups
    return frozenset(id(p) for group in groups for p in group["params"])
