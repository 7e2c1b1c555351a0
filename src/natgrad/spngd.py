"""SPNGD: scalable and practical natural gradient descent, a complete optimizer."""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad import options
from natgrad.capture.unwrap import unwrap
from natgrad.checkpoint.optimizer_state import travel_with
from natgrad.checkpoint.sharded import only_initialises
from natgrad.distributed.communicator import CommOptions
from natgrad.engine.auto import Profile
from natgrad.engine.engine import Engine
from natgrad.engine.overflow import Overflow
from natgrad.engine.users import Inspectable
from natgrad.factors.refresh import Adaptive, Refresh
from natgrad.layers import Block
from natgrad.layers.registration import require_known
from natgrad.math import foreach
from natgrad.math.statistics import widen
from natgrad.options import Curvature, require_choice, require_number
from natgrad.plan import Strategy
from natgrad.rules.lengths import kl_trust, layer_trust, rescale
from natgrad.rules.momentum import (
    VELOCITY,
    averaged,
    gather_momentum,
    require_momentum,
    velocity_of,
    worked_on,
)

DEFAULT_REFRESH = Adaptive()
Average = Literal["update", "gradient"]
RULE = ("average", "nesterov", "rescale_weights")


class SPNGD(Inspectable, Optimizer):
    """Natural gradient descent with momentum (Osawa et al. 2020, SP-NGD).

    ``w <- w - lr (F + damping I)^-1 gradient + momentum v``, where v is the last change
    of w (eq. 23). Parameters without a block follow the same rule with their plain
    gradient. On several ranks it reduces gradients itself, to the ranks that need them,
    and all ranks begin with the parameters and buffers of rank 0; a module wrapped in
    `DistributedDataParallel` works too, but has every rank get every gradient. ::

        optimizer = natgrad.SPNGD(model, lr=0.02, momentum=0.9, damping=1e-3)

    Args:
        model: the module to train.
        lr: learning rate, > 0. LR schedulers and parameter groups can change it.
        momentum: weight of the last change, in [0, 1). With
            `natgrad.schedules.PolynomialDecay` it follows the learning rate (eq. 22).
        weight_decay: times the weight, is added to the gradient before preconditioning.
            With ``trust="layer"``, which gives a gradient another length, it is
            decoupled instead: a step takes lr times this part of the weight away, and
            biases, norms and parameters without a block keep theirs.
        rescale_weights: keep the weight of linear and convolution layers at norm
            sqrt(2 d_out) (eq. 24).
        nesterov: look ahead: use the momentum that the next step will have.
        average: what momentum is a running average of: the ``"update"`` (SP-NGD, eq.
            23) or the ``"gradient"``, which is then scaled (as Muon and Adam do; the
            average has no bias and weights that add up to 1, so that with momentum m a
            learning rate means 1 - m of what it means for ``"update"``).
        param_groups: groups made of ``named_parameters``, for options of their own; all
            parameters of the model in one group by default.
        trust: as for `KFAC`. None: ``"none"``.
        damping_style: as for `KFAC`. None: ``"factored"``, but ``"eigen"`` for
            ``scale="corrected"``.

    As for `KFAC`: statistics, scale, whitening, basis, moments, kl_clip, rest,
    rest_rate, beta2, damping, decay, refresh, fisher, loss, accumulation, sharing,
    norm, norm_damping_ratio, skip, subsample, largest_factor, grad_scaler, strategy,
    placement, profile, comm, group.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        rescale_weights: bool = False,
        nesterov: bool = False,
        average: Average = "update",
        param_groups: Iterable[dict[str, Any]] | None = None,
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
        decay: float = 0.0,
        refresh: Refresh = DEFAULT_REFRESH,
        fisher: options.Fisher = "empirical",
        loss: options.Loss = "mean",
        accumulation: options.Accumulation = "mean",
        sharing: options.Sharing = "expand",
        norm: options.Norm = "unit",
        norm_damping_ratio: float = 1.0,
        skip: Collection[str] = (),
        subsample: int | None = 1,
        largest_factor: int | None = options.LARGEST_FACTOR,
        grad_scaler: torch.amp.GradScaler | None = None,
        strategy: str | Strategy = "spngd",
        placement: str = "longest_first",
        profile: Profile | None = None,
        comm: CommOptions | None = None,
        group: Any = None,
    ) -> None:
        require_number("lr", lr, "a number > 0", above=0.0)
        require_choice("average", average, get_args(Average))
        curvature = Curvature(
            statistics=statistics,
            scale=scale,
            whitening=whitening,
            basis=basis,
            moments=moments,
            trust=options.trust_for(trust, scale, "none"),
            kl_clip=kl_clip,
            rest=rest,
            rest_rate=rest_rate,
            beta2=beta2,
            damping=damping,
            damping_style=options.style_for(
                damping_style, scale, statistics, "factored"
            ),
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
        self.rescale_weights = rescale_weights
        self.nesterov = nesterov
        self.average = average
        plain, _ = unwrap(model)
        groups = param_groups or [{"params": list(plain.named_parameters())}]
        rates = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        Optimizer.__init__(self, groups, rates)
        for g in self.param_groups:
            require_number("momentum", g["momentum"], "in [0, 1)", low=0.0, below=1.0)
            require_number("weight_decay", g["weight_decay"], "a number >= 0", low=0.0)
        self.engine: Engine = Engine(
            model,
            curvature,
            strategy=strategy,
            placement=placement,
            profile=profile,
            comm=comm or CommOptions(),
            group=group,
            grad_scaler=grad_scaler,
            optimizer=self,
            rule={k: vars(self)[k] for k in RULE},
            agrees_on_overflow=True,
        )
        self._overflow = Overflow(self, self.engine, grad_scaler)
        with self.engine.closing_on_error():
            self._group_of()  # raises if a block is in no group
        check = partial(require_momentum, self, self.engine, average == "gradient")
        self._handles = travel_with(self, self.engine, check)
        self.engine.before_replan.append(self._gather_velocity)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """One update of the weights (SP-NGD, Algorithm 3, from Stage 2 on).

        If a gradient on any rank is not finite, nothing changes.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        engine = self.engine
        if only_initialises(engine, self.param_groups):
            for p in worked_on(engine, mine=True):
                self._velocity(p)
            return value
        with engine.attempt():
            require_known(engine.model, engine.blocks)
            overflow = self._overflow.unscaled()
            captured, sums = engine.reduce_statistics()
            gradients = engine.reduce_gradients()
            verdict = engine.agree(captured, overflow)
            if not verdict.finite:
                engine.skip_step(overflow=self._overflow.told(overflow))
                return value
            engine.refresh(sums, verdict)
            gradients = self._decayed(verdict.among(gradients))
            directions = self._averaged(gradients)
            updates = engine.precondition(directions, gradients)
            updates = self._trusted(directions, updates, gradients)
            mine = [engine.block[name] for name in updates]
            before = self._before(mine)
            with engine.meter("update"):
                self._update(mine, updates)
            self._share_weights(mine, verdict.present, before)
            # what a gather brought grows stale where this rank does not work
            for p in worked_on(engine, mine=False):
                self.state.pop(p, None)
            engine.end()
        return value

    def _decayed(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients with the weight decay of their group, unless it is decoupled."""
        if self.engine.config.trust == "layer":
            return gradients
        group_of = self._group_of()
        for name, g in gradients.items():
            block = self.engine.block[name]
            decays = [group_of[id(p)]["weight_decay"] for p in block.parameters]
            if any(decays):
                pairs = zip(decays, block.parameters, strict=True)
                gradients[name] = g + block.fold([d * p for d, p in pairs])
        return gradients

    def _averaged(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """With ``average="gradient"``, the running averages, without their bias."""
        if self.average == "update":
            return gradients
        averages: dict[int, Tensor] = {}
        for group, params, grads in self._by_group(gradients):
            m = float(group["momentum"])
            found = averaged(self.state, params, grads, m, self.nesterov)
            averages |= {id(p): x for p, x in zip(params, found, strict=True)}
        return {
            name: block.fold([averages[id(p)] for p in block.parameters])
            for name, block in ((name, self.engine.block[name]) for name in gradients)
        }

    def _trusted(
        self,
        directions: dict[str, Tensor],
        updates: dict[str, Tensor],
        gradients: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Updates at the length that the chosen trust gives them."""
        updates = layer_trust(self.engine, updates, gradients)
        lr = max(float(group["lr"]) for group in self.param_groups)
        nu = kl_trust(self.engine, directions, updates, lr)
        if nu is None:
            return updates
        kind = {name: self.engine.block[name].kind for name in updates}
        return {n: u if kind[n] is None else u * nu for n, u in updates.items()}

    def _update(self, blocks: list[Block], updates: dict[str, Tensor]) -> None:
        """eq. 23 and 24 for the blocks that this rank works on, a group at a time."""
        if self.engine.config.trust == "layer":
            self._shrink(blocks)
        for group, params, changes in self._by_group(updates):
            if self.average == "gradient":
                foreach.add_(params, changes, -group["lr"])
            else:
                self._move(group, params, changes)
        if self.rescale_weights:
            self._rescale([b for b in blocks if b.kind is not None and b.kind.rescaled])

    def _shrink(self, blocks: list[Block]) -> None:
        """Decoupled decay, of weights that have factors."""
        weights = {id(b.parameters[0]) for b in blocks if b.is_factored}
        for group in self.param_groups:
            decayed = [p for p in group["params"] if id(p) in weights]
            if group["weight_decay"] and decayed:
                foreach.scale_(decayed, 1 - group["lr"] * group["weight_decay"])

    def _by_group(
        self, stacks: dict[str, Tensor]
    ) -> Iterator[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
        """Parameters of the named blocks and tensors like them, by parameter group."""
        group_of = self._group_of()
        by_group: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for name, stack in stacks.items():
            block = self.engine.block[name]
            for p, x in zip(block.parameters, block.unfold(stack), strict=True):
                by_group.setdefault(id(group_of[id(p)]), []).append((p, x))
        for group in self.param_groups:
            pairs = by_group.get(id(group), [])
            if pairs:
                yield group, [p for p, _ in pairs], [x for _, x in pairs]

    def _move(
        self, group: dict[str, Any], params: list[Tensor], updates: list[Tensor]
    ) -> None:
        velocity = [self._velocity(p) for p in params]
        foreach.scale_(velocity, group["momentum"])
        foreach.add_(velocity, updates, -group["lr"])
        if self.nesterov:
            foreach.add_(params, velocity, group["momentum"])
            foreach.add_(params, updates, -group["lr"])
        else:
            foreach.add_(params, velocity)

    def _velocity(self, p: Tensor) -> Tensor:
        return velocity_of(self.state, p, self.average == "gradient")

    def _rescale(self, blocks: list[Block]) -> None:
        """eq. 24; the rescaling is part of the last change of w, if that is kept."""
        changes = rescale(blocks)
        if changes and self.average == "update":
            foreach.add_([self._velocity(b.parameters[0]) for b in blocks], changes)

    def _before(self, mine: list[Block]) -> dict[int, Tensor] | None:
        """The weights that this rank will change, if only changes are to be shared."""
        engine = self.engine
        wire = engine.comm.options.wire_dtype("share_updates", engine.like.dtype)
        if engine.comm.world == 1 or wire == engine.like.dtype:
            return None
        return {id(p): p.clone() for b in mine for p in b.parameters}

    def _share_weights(
        self,
        mine: list[Block],
        present: frozenset[str],
        before: dict[int, Tensor] | None,
    ) -> None:
        """Stage 5: every rank gets the weights that another rank has updated.

        In half precision their changes instead, which all ranks add, rounded alike: a
        rounded weight would swallow the changes that are smaller than its last bit.
        """
        engine = self.engine
        if engine.comm.world == 1:
            return
        shared = {b.name: b.fold(list(b.parameters)) for b in mine}
        if before is not None:
            for b in mine:
                old = b.fold([before[id(p)] for p in b.parameters])
                shared[b.name] = shared[b.name] - old
        for name, stack in engine.share(shared, present).items():
            block = engine.block[name]
            for p, x in zip(block.parameters, block.unfold(stack), strict=True):
                p.copy_(x if before is None else before.get(id(p), p) + x)

    def gather(self) -> None:
        """Collective: put all statistics and momentum on every rank.

        `state_dict` is then whole on each of them, until the next step.
        """
        self.engine.gather()
        self._gather_velocity()

    def _gather_velocity(self) -> None:
        gather_momentum(self.state, self.engine, self.average == "gradient")

    def _group_of(self) -> dict[int, dict[str, Any]]:
        groups = {id(p): g for g in self.param_groups for p in g["params"]}
        for block in self.engine.blocks:
            if any(id(p) not in groups for p in block.parameters):
                raise ValueError(
                    f"The parameters of {block.name} are in no parameter group. Must "
                    "be in one, or have requires_grad=False."
                )
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Momentum, groups, and the statistics under a key of their own."""
        return Optimizer.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Continue from a `state_dict` of the same model and options."""
        Optimizer.load_state_dict(self, state_dict)
        # torch has cast the momentum to the parameters' dtype
        numbers = [i for g in state_dict["param_groups"] for i in g["params"]]
        params = [p for g in self.param_groups for p in g["params"]]
        for i, p in zip(numbers, params, strict=True):
            saved = state_dict["state"].get(i, {}).get(VELOCITY)
            if saved is not None:
                velocity = saved.to(p.device, widen(p).dtype, copy=True)
                self.state[p][VELOCITY] = velocity

    def __repr__(self) -> str:
        return Optimizer.__repr__(self)

    def close(self) -> None:
        """Remove every hook from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.engine.close()
