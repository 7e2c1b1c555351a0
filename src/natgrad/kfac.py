"""KFAC: a gradient preconditioner for any torch optimizer."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad import options as o
from natgrad.capture.hooks import as_written
from natgrad.checkpoint.optimizer_state import CopyGuard, attach_state, require_free
from natgrad.engine.agreement import require_known
from natgrad.engine.engine import Engine
from natgrad.engine.step import Directions, Updates
from natgrad.engine.users import Inspectable
from natgrad.factors.refresh import Refresh
from natgrad.layers import Block
from natgrad.layers.groups import Named, parameters_of
from natgrad.layers.unwrap import unwrap
from natgrad.options import NOT_GIVEN, NotGiven, Options, given
from natgrad.plan import Strategy
from natgrad.quadratic.damping import with_value
from natgrad.quadratic.hosts import coupled_decay, require_host
from natgrad.quadratic.options import AUTO
from natgrad.rules.fallbacks import Plain
from natgrad.rules.lengths import KLClip, Length
from natgrad.rules.parts import Parts
from natgrad.rules.rule import Rule


class KFAC(Inspectable):
    """Precondition a model's gradients with K-FAC (Pauloski et al. 2020).

    With an optimizer, gradients are preconditioned inside ``optimizer.step()`` and the
    state travels in ``optimizer.state_dict()``: the training loop stays as it is. ::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        natgrad.KFAC(model, optimizer)

    Without one, call `step` between ``loss.backward()`` and ``optimizer.step()``.
    With ``damping="auto"`` give ``optimizer.step`` a closure that returns outputs and
    loss, without a backward; a list of closures is one of micro-batches.

    Parameters that belong to no known layer, and layers that the optimizer does not
    have, keep their plain gradient; `report` says which and why.

    Args:
        model: a module, or one wrapped in `DistributedDataParallel`.
        optimizer: any torch optimizer over the model's parameters.
        grad_scaler: the `torch.amp.GradScaler` in use, to undo its loss scale.
        options: the `Options` to start from, ``KFAC.defaults`` if not given.

    These replace the option of the same name (see `Options`): rule, length, damping,
    factor_decay, refresh, loss, norm, strategy. Layers get rules of their own by a list
    of pairs, ``rule=[("encoder", EKFAC()), ([model.head], Plain())]``: names of modules
    or parameters, modules, or a list of these, and a rule. Of pairs that name the same
    parameter the last one counts; what none names follows the rule of the options.
    """

    defaults: ClassVar[Options] = Options()
    """The options that hold unless others are given."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        rule: Rule | Sequence[tuple[Named, Rule]] | NotGiven = NOT_GIVEN,
        length: Length | NotGiven | None = NOT_GIVEN,
        damping: o.Damping | o.AutoDamping | o.Auto | NotGiven = NOT_GIVEN,
        factor_decay: float | NotGiven = NOT_GIVEN,
        refresh: Refresh | NotGiven = NOT_GIVEN,
        loss: o.Loss | NotGiven = NOT_GIVEN,
        norm: o.Norm | NotGiven = NOT_GIVEN,
        strategy: str | Strategy | NotGiven = NOT_GIVEN,
        grad_scaler: torch.amp.GradScaler | None = None,
        options: Options | NotGiven = NOT_GIVEN,
    ) -> None:
        require_free(optimizer)
        unwrap(model)  # a model that is none is told before what it lacks
        self.optimizer = optimizer
        chosen = given(
            self.defaults,
            options,
            rule=NOT_GIVEN if isinstance(rule, Sequence) else rule,
            length=length,
            damping=damping,
            factor_decay=factor_decay,
            refresh=refresh,
            loss=loss,
            norm=norm,
            strategy=strategy,
        )
        _require_effect(chosen)
        asked, chosen, current = chosen, *with_value(chosen)
        pairs = rule if isinstance(rule, Sequence) else ()
        parts = _parts_by_id(unwrap(model)[0], optimizer, chosen, pairs)
        for length_of in dict.fromkeys(p.length for p in parts.values()):
            _require_rate(length_of, optimizer)
        if asked.is_auto:
            _require_tunable(asked, optimizer)
        self.engine: Engine = Engine(
            model,
            chosen,
            grad_scaler=grad_scaler,
            groups=parts,
            optimizer=optimizer,
            follows_ddp=True,
        )
        self._handles: list[Any] = []
        if current is not None:
            with self.engine.closing_on_error():
                self.engine.tune(asked, current)
        if optimizer is not None:
            # also inside a compiled optimizer.step
            handle = optimizer.register_step_pre_hook(as_written(self._before_step))
            self._handles = [handle, *attach_state(optimizer, self.engine)]
            self._handles.append(CopyGuard(optimizer))
        if optimizer is not None and self.engine.tuner is not None:
            handle = optimizer.register_step_post_hook(as_written(self._after_step))
            self._handles.append(handle)

    def _before_step(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Precondition; given a closure, as Lightning does, each time it has run."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        tuner, optimizer = self.engine.tuner, self.optimizer
        if closure is None and tuner is None:
            self.step()
            return None

        def preconditioned() -> Any:
            if tuner is not None and optimizer is not None:
                loss = tuner.evaluate(closure, optimizer.zero_grad)
                tuner.begin(coupled_decay(optimizer, self.engine.model))
            else:
                loss = closure() if closure is not None else None
            self.step()
            return loss

        return args[:1], {**kwargs, "closure": preconditioned}

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        """Let damping learn from the step that the optimizer has taken."""
        if self.engine.tuner is not None:
            self.engine.tuner.look()
            self.engine.tuner.end()

    @torch.no_grad()
    def step(self) -> None:
        """Replace the gradients by preconditioned ones (Pauloski et al., Algorithm 1).

        If a gradient on any rank is not finite, all gradients are set to None, so that
        the optimizer skips the step, and the statistics stay as they were.
        """
        groups = self.optimizer.param_groups if self.optimizer else [{"lr": 1.0}]
        if self.engine.only_initialises(groups):
            return
        self.engine.run(self)

    def begin(self) -> None:
        """What must hold before a step."""
        if self.engine.own_gradients:  # else DDP, or nobody, must average them
            require_known(self.engine.model, self.engine.blocks)

    def skipped(self, overflow: Tensor | None) -> bool:
        """Clear the gradients of the host, also of parameters that are not the model's.

        A scaler learns of overflows from the gradients that DDP has averaged.
        """
        groups = self.optimizer.param_groups if self.optimizer else []
        for p in (p for group in groups for p in group["params"]):
            p.grad = None
        return False

    def local_gradients(self, block: Block) -> list[Tensor] | None:
        """What this rank has of them, as they are."""
        return block.local_gradients()

    def directions(self, gradients: dict[str, Tensor]) -> Directions:
        """The gradients themselves, without the scale of a `GradScaler`."""
        unit = self._gradient_scale()
        if unit is not None:
            gradients = {name: g / unit for name, g in gradients.items()}
        return Directions(directions=gradients, gradients=gradients)

    def learning_rate(self, names: Iterable[str]) -> float:
        """For the KL clip."""
        if self.optimizer is None:
            return 1.0
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def write(self, found: Updates) -> None:
        """Put updates into ``.grad``, in its unit."""
        unit = self._gradient_scale()
        if self.engine.shards is not None:
            clipped = self.engine.clipped(found)
            for name, x in self.engine.shards.spread(clipped, found.present).items():
                self.engine.block[name].put_gradients(x, unit)
            return self._hold_back(found)
        shared = self.engine.share(found.updates, found.present)
        for name, update in (found.updates | shared).items():
            block = self.engine.block[name]
            if block.kind is not None:
                block.write_gradient(update, _product(found.clips.get(name), unit))
            elif self.engine.own_gradients or _changes(block):
                block.write_gradient(update, unit)
        self._hold_back(found)

    def _hold_back(self, found: Updates) -> None:
        """The optimizer leaves alone what has no update yet."""
        for p in (p for n in found.waiting for p in self.engine.block[n].parameters):
            p.grad = None

    def _gradient_scale(self) -> Tensor | None:
        """What gradients are still multiplied by: fused optimizers divide it out.

        Its `GradScaler` leaves that to such an optimizer, inside its step.
        """
        return getattr(self.optimizer, "grad_scale", None)

    def state_dict(self) -> dict[str, Any]:
        """Statistics, inverses and timing, as tensors and numbers."""
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of the same model and options."""
        self.engine.load_state_dict(state)


def _changes(block: Block) -> bool:
    return block.is_asked or not isinstance(block.rule, Plain)


def _product(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x * y


def _parts_by_id(
    model: nn.Module,
    optimizer: Optimizer | None,
    options: Options,
    rules: Sequence[tuple[Named, Rule]],
) -> dict[int, Parts]:
    """What the update of each of the optimizer's parameters is made of, by id."""
    groups = optimizer.param_groups if optimizer else [{"params": model.parameters()}]
    usual = options.parts()
    found = {id(p): usual for group in groups for p in group["params"]}
    for named, rule in rules:
        parts = dataclasses.replace(options, rule=rule).parts()
        own = [id(p) for p in parameters_of(model, named)]
        found |= {number: parts for number in own if number in found}
    return found


HOST = ("lr", "momentum", "weight_decay", "average", "decay")
"""Options of what `KFAC` leaves to its host optimizer."""


def _require_effect(options: Options) -> None:
    """Raise if an option is given that would have no effect."""
    for name in HOST:
        value, usual = getattr(options, name), getattr(KFAC.defaults, name)
        if value not in (usual, AUTO):  # which has an error of its own
            raise ValueError(
                f"Invalid {name}={value!r} of KFAC: it would have no effect. Must be "
                f"{usual!r}, the default: set {name} in the optimizer that KFAC "
                "preconditions for."
            )


def _require_tunable(options: Options, optimizer: Optimizer | None) -> None:
    """Damping is found for an optimizer that takes its own steps."""
    if AUTO in (options.lr, options.momentum):
        raise ValueError(
            f"Invalid lr={options.lr!r} and momentum={options.momentum!r} of KFAC. The "
            "optimizer has its own: must be numbers. SPNGD finds them."
        )
    require_host(optimizer)


def _require_rate(length: Length, optimizer: Optimizer | None) -> None:
    """The KL clip reads the learning rate of the optimizer, or is told it."""
    if not isinstance(length, KLClip):
        return
    if optimizer is None and length.lr is None:
        raise ValueError(
            f"{length!r} needs the learning rate: give an optimizer, or "
            "length=KLClip(lr=...), or length=Free()."
        )
    if optimizer is not None and length.lr is not None:
        raise ValueError(
            f"Invalid lr={length.lr} of KLClip. Must be None beside an optimizer: its "
            "learning rate is used."
        )
