"""SPNGD: scalable and practical natural gradient descent, a complete optimizer."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad import options as o
from natgrad.checkpoint.momentum import (
    averages_of,
    gather_momentum,
    keep_whole,
    require_momentum,
    restore_velocity,
    worked_on,
)
from natgrad.checkpoint.optimizer_state import attach_state
from natgrad.engine.agreement import Overflow, require_known
from natgrad.engine.engine import Engine
from natgrad.engine.step import Directions, Updates
from natgrad.engine.users import Inspectable
from natgrad.factors.refresh import Adaptive, Every, Paced, Refresh
from natgrad.layers import Block
from natgrad.layers.matrices import fold_all, unfold_all
from natgrad.layers.registration import require_inside
from natgrad.layers.unwrap import unwrap
from natgrad.math import foreach
from natgrad.math.shards import local
from natgrad.options import NOT_GIVEN, NotGiven, Options, given, parts_of_group
from natgrad.plan import Strategy
from natgrad.quadratic.damping import with_value
from natgrad.quadratic.rates import Rates, before_first, require_no_rates
from natgrad.requiring import require_number
from natgrad.rules.kronecker import Kronecker
from natgrad.rules.lengths import Free
from natgrad.rules.motion import Decay, Places
from natgrad.rules.parts import Parts
from natgrad.rules.rule import Rule


class SPNGD(Inspectable, Optimizer):
    """Natural gradient descent with momentum (Osawa et al. 2020, SP-NGD).

    ``w <- w - lr (F + damping I)^-1 gradient + momentum v``, where v is the last change
    of w (eq. 23). Parameters without a layer follow the same rule with their plain
    gradient. On several ranks it reduces gradients itself, to the ranks that need them,
    and all ranks begin with the parameters and buffers of rank 0; a module wrapped in
    `DistributedDataParallel` works too, but has every rank get every gradient. ::

        optimizer = natgrad.SPNGD(model, lr=0.02, momentum=0.9, damping=1e-3)

    Args:
        model: the module to train.
        groups: parameter groups made of ``named_parameters``, as for any torch
            optimizer. Each may have its own ``lr``, ``momentum`` and ``weight_decay``,
            and its own ``rule``, ``fallback``, ``length``, ``average``, ``decay``,
            ``damping`` and ``refresh``. What no group names is left to another
            optimizer. By default all parameters of the model are one group.
        grad_scaler: the `torch.amp.GradScaler` in use, to undo its loss scale.
        options: the `Options` to start from, ``SPNGD.defaults`` if not given.

    These replace the option of the same name (see `Options`): lr (required), momentum,
    weight_decay, rule, damping, refresh, loss, strategy. LR schedulers change the
    learning rate; with `natgrad.schedules.PolynomialDecay` momentum follows (eq. 22).
    """

    defaults: ClassVar[Options] = Options(
        rule=Kronecker(style="factored"),
        length=Free(),
        refresh=Adaptive(),
        factor_decay=0.0,
        norm="unit",
        strategy="spngd",
    )
    """The options that hold unless others are given."""
    finds_rates: ClassVar[bool] = True
    """Whether a rate may be "auto": only of a natural gradient."""
    auto: ClassVar[Options] = Options(
        lr="auto",
        momentum="auto",
        damping="auto",
        rule=Kronecker(style="eigen"),
        length=Free(),
        refresh=Paced(Every(5, 5), share=1.0),
        factor_decay=0.77,  # 0.95 a step
        fisher="sampled",
        norm="unit",
        strategy="spngd",
    )
    """Those that hold if a rate or the damping is to be found."""

    def __init__(
        self,
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
    ) -> None:
        kind = type(self)
        auto = kind.auto if kind.finds_rates else None
        defaults = kind.__name__, kind.defaults, auto
        chosen = given(
            o.defaults_for(*defaults, lr, momentum, damping),
            options,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            rule=rule,
            damping=damping,
            refresh=refresh,
            loss=loss,
            strategy=strategy,
        )
        if chosen.lr is None:
            name = type(self).__name__
            raise TypeError(f"Invalid lr=None: {name} needs a learning rate: lr=...")
        plain, _ = unwrap(model)
        names = "lr", "momentum", "weight_decay"
        rates = {name: before_first(name, getattr(chosen, name)) for name in names}
        mine = [dict(group) for group in groups or self._usual_groups(plain, chosen)]
        require_no_rates(mine, chosen)
        asked, chosen, current = chosen, *with_value(chosen)
        parts = [parts_of_group(group, chosen) for group in mine]
        Optimizer.__init__(self, mine, rates)
        self.engine: Engine = Engine(
            model,
            chosen,
            grad_scaler=grad_scaler,
            groups=_parts_by_id(self.param_groups, parts),
            optimizer=self,
            agrees_on_overflow=True,
        )
        averages = {n: x.average for n, x in self.engine.parts.items()}
        self._places = Places(self.param_groups, self.engine.blocks, averages)
        self._overflow = Overflow(self, grad_scaler, own=self.engine.own_gradients)
        with self.engine.closing_on_error():
            require_inside(self.engine.model, self.param_groups)
            if asked.is_auto:
                tuner, restart = self.engine.tune(asked, current), self.engine.restart
                mine = partial(averages_of, self.engine.statistics)
                self._rates = Rates(self, tuner, mine, restart)
        tuned = isinstance(asked.momentum, str)  # "auto"
        check = partial(require_momentum, self, self.engine.statistics, tuned)
        self._handles = attach_state(self, self.engine, check)
        self.engine.before_replan.append(self._gather_velocity)

    def _usual_groups(self, model: nn.Module, options: Options) -> list[dict[str, Any]]:
        """What is trained if no groups are given: everything, in one group."""
        return [{"params": list(model.named_parameters())}]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: its plan has every parameter already."""
        if hasattr(self, "engine"):
            raise RuntimeError(
                "A parameter group cannot be added: who works on what is planned at "
                "construction. Make a new optimizer with all groups."
            )
        Optimizer.add_param_group(self, param_group)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None
    ) -> Any:
        """One update of the weights (SP-NGD, Algorithm 3, from Stage 2 on).

        If a gradient on any rank is not finite, nothing changes.

        With something ``"auto"`` the closure returns outputs and loss, without a
        backward, and may run several times; a list is one of micro-batches.
        """
        value, tuner = None, self.engine.tuner
        if tuner is not None:
            value = self._rates.evaluate(closure)
        elif callable(closure):
            with torch.enable_grad():
                value = closure()
        if self.engine.only_initialises(self.param_groups):
            keep_whole(self.state, self.engine.statistics)
            kept = {id(p) for p in worked_on(self.engine.statistics, mine=True)}
            for p, average in averages_of(self.engine.statistics):
                if id(p) in kept:
                    average.velocity(self.state, p)
            return value
        self.engine.run(self)
        if tuner is not None:
            tuner.end()
        return value

    def begin(self) -> Tensor | None:
        """What must hold before a step, and what a scaler found."""
        require_known(self.engine.model, self.engine.blocks)
        return self._overflow.unscaled()

    def skipped(self, overflow: Tensor | None) -> bool:
        """Tell the scaler, if it is one's, that some rank has an overflow."""
        if self.engine.tuner is not None:
            self._rates.skipped()
        return self._overflow.told(overflow)

    def directions(self, gradients: dict[str, Tensor]) -> Directions:
        """Gradients with coupled weight decay, and what momentum makes of them."""
        gradients = self._decayed(gradients)
        parts, averages = self.engine.parts, dict[int, Tensor]()
        left, noise = dict[int, float](), dict[str, float]()
        newest = dict[str, float | None]()
        averaged = {n: g for n, g in gradients.items() if parts[n].average.keeps_mass}
        if self.engine.sharded:
            keep_whole(self.state, self.engine.statistics)
        for group, average, params, grads in self._places.sorted(
            self.param_groups, self._means(averaged)
        ):
            m = float(group["momentum"])
            found = average.directions(self.state, params, grads, m)
            averages |= {id(p): x for p, x in zip(params, found, strict=True)}
            left |= dict.fromkeys(map(id, params), average.noise(m))
        ours = [self.engine.block[name] for name in averaged]
        ours = [block for block in ours if not block.is_foreign]
        means = [[averages[id(p)] for p in block.parameters] for block in ours]
        folded = zip([b.name for b in ours], fold_all(ours, means), strict=True)
        directions = gradients | dict(folded)
        for block in ours:
            noise[block.name] = left[id(block.parameters[0])]
            if block.rule.projects:
                newest[block.name] = self._newest(block)
        return Directions(
            directions=directions, gradients=gradients, noise=noise, newest=newest
        )

    def _newest(self, block: Block) -> float | None:
        """The weight of this step's gradient in a block's direction, if it has one."""
        average, groups = self.engine.parts[block.name].average, self.param_groups
        pairs = zip(block.parameters, self._places.of(groups, block.name), strict=True)
        found = {average.newest(self.state, p, g["momentum"]) for p, g in pairs}
        return found.pop() if len(found) == 1 else None

    def learning_rate(self, names: Iterable[str]) -> float:
        """The largest of these blocks' groups, for the KL clip."""
        return self._places.largest(self.param_groups, names)

    def write(self, found: Updates) -> None:
        """Move the weights that this rank works on, and get the others."""
        engine, updates = self.engine, self.engine.clipped(found)
        if engine.tuner is not None:
            return self._write_tuned(updates, found.present)
        if engine.shards is not None:
            pieces = engine.shards.spread(updates, found.present)
            with engine.meter("update"):
                self._move(pieces)
            return self._forget_gathered()
        mine = [engine.block[name] for name in updates]
        before = engine.weights_before(mine)
        with engine.meter("update"):
            self._move(self._unfolded(updates))
        engine.share_weights(mine, updates, found.present, before)
        self._forget_gathered()

    def _forget_gathered(self) -> None:
        """What a gather brought grows stale where this rank does not work."""
        many = self.engine.comm.world > 1
        for p in worked_on(self.engine.statistics, mine=False) if many else ():
            self.state.pop(p, None)

    def _write_tuned(self, updates: dict[str, Tensor], present: frozenset[str]) -> None:
        """Every rank gets all updates, agrees on the rates and takes the whole step."""
        engine = self.engine
        updates = updates | engine.share(updates, present)
        for block in (engine.block[name] for name in updates):
            if block.is_foreign and engine.own_gradients:
                block.write_gradient(updates[block.name])
        with engine.meter("quadratic"):
            moves = self._places.sorted(self.param_groups, self._unfolded(updates))
            self._rates.find(moves)
        with engine.meter("update"):
            self._move(self._unfolded(updates))
        with engine.meter("quadratic"):
            self._rates.judge()

    def _decayed(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients with the weight decay of their group, unless it is decoupled."""
        for name, g in gradients.items() if self.engine.shards is None else ():
            block = self.engine.block[name]
            decays = self._coupled_decays(block)
            if any(decays):
                pairs = zip(decays, block.parameters, strict=True)
                gradients[name] = g + block.fold([d * p for d, p in pairs])
        return gradients

    def _coupled_decays(self, block: Block) -> list[float]:
        """Of a block's parameters; none if they are not ours, or it is decoupled."""
        if not self.engine.parts[block.name].decay.coupled:
            return []
        groups = self._places.of(self.param_groups, block.name)
        return [group["weight_decay"] for group in groups]

    def local_gradients(self, block: Block) -> list[Tensor] | None:
        """What this rank has of them, with coupled weight decay of those weights."""
        found, decays = block.local_gradients(), self._coupled_decays(block)
        if found is None or not any(decays):
            return found
        if any(spec.is_local for spec in block.spec.statistics):
            raise ValueError(
                f"Invalid weight_decay={max(decays)} of {block.name}, sharded, whose "
                "rule has factors from gradients. Must be 0, or with decay=Decoupled()."
            )
        both = zip(found, decays, block.parameters, strict=True)
        return [g + d * local(p) for g, d, p in both]

    def _means(self, stacks: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        """As `_unfolded`, but the ``.grad`` of parameters where those are the same."""
        blocks = [self.engine.block[n] for n in stacks]
        plain = [b.name for b in blocks if not any(self._coupled_decays(b))]
        own = {n: x for n in plain if (x := self.engine.gradients_of(n)) is not None}
        return own | self._unfolded({n: g for n, g in stacks.items() if n not in own})

    def _unfolded(self, stacks: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        """Stacks ``(s, m, n)`` by block as tensors by parameter."""
        blocks = [self.engine.block[name] for name in stacks]
        found = unfold_all(blocks, [*stacks.values()])
        return dict(zip(stacks, found, strict=True))

    def _move(self, updates: dict[str, list[Tensor]]) -> None:
        """eq. 23 and 24 for what this rank has of its blocks, a group at a time."""
        blocks = [self.engine.block[name] for name in updates]
        parts, by_decay = self.engine.parts, dict[Decay, list[Block]]()
        for block in blocks:
            if not block.is_foreign:
                by_decay.setdefault(parts[block.name].decay, []).append(block)
        decays = [(d, b) for d, its in by_decay.items() for b in its]
        self._shrink([p for decay, b in decays for p in decay.decayed(b)])
        for group, average, params, changes in self._places.sorted(
            self.param_groups, updates
        ):
            lr, momentum = group["lr"], group["momentum"]
            average.move(self.state, params, changes, lr, momentum)
        for decay, its in by_decay.items():
            if not (changes := decay.rescaled(its, self.engine.references)):
                continue
            average = {id(p): parts[b.name].average for b in its for p in b.parameters}
            for p, change in changes:
                average[id(p)].follow(self.state, p, change)

    def _shrink(self, params: list[Tensor]) -> None:
        """Decoupled decay, a group at a time."""
        chosen = {id(p) for p in params}
        for group in self.param_groups:
            decayed = [p for p in group["params"] if id(p) in chosen]
            if group["weight_decay"] and decayed:
                mine = [local(p) for p in decayed]
                foreach.scale_(mine, 1 - group["lr"] * group["weight_decay"])

    def gather(self) -> None:
        """Collective: put all statistics and momentum on every rank.

        `state_dict` is then whole on each of them, until the next step.
        """
        self.engine.gather()
        self._gather_velocity()

    def _gather_velocity(self) -> None:
        gather_momentum(self.state, self.engine.statistics)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Continue from a `state_dict` of the same model and options."""
        Optimizer.load_state_dict(self, state_dict)
        restore_velocity(self, state_dict)


def _parts_by_id(
    groups: Iterable[dict[str, Any]], parts: Iterable[Parts]
) -> dict[int, Parts]:
    """What updates are made of, by the ids of parameters; raises on illegal rates."""
    found: dict[int, Parts] = {}
    for group, part in zip(groups, parts, strict=True):
        momentum, decay = group["momentum"], group["weight_decay"]
        require_number("momentum", momentum, "in [0, 1)", low=0.0, below=1.0)
        require_number("weight_decay", decay, "a number >= 0", low=0.0)
        found |= dict.fromkeys(map(id, group["params"]), part)
    return found
