"""From settings to an update rule: one object that the loop steps.

`make` returns a `Method`: the optimizer, the K-FAC preconditioner when there is one,
and what of them can be logged.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad import KFAC, SPNGD, CommOptions, Polar
from natgrad_lab.errors import UserError
from natgrad_lab.train.config import CurvatureConfig, OptimizerConfig, TrainConfig
from natgrad_lab.train.flat import Flat
from natgrad_lab.train.parts import Parts
from natgrad_lab.train.schedules import make_damping, make_refresh

# Of what has no trust ratio beside what has one: natgrad.Polar's default.
REST_RATE = 0.2


class Maker(Protocol):
    """Makes an optimizer of parameters."""

    def __call__(
        self, params: Iterable[nn.Parameter], c: OptimizerConfig
    ) -> Optimizer: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """An update rule ready to step.

    ``curved`` is the object that estimates statistics (KFAC or SPNGD), if any.
    """

    optimizer: Optimizer
    curved: KFAC | SPNGD | None = None
    damping: Callable[[int], float] | None = None
    sampled: bool = False

    def before_backward(self, outputs: Tensor) -> None:
        """The extra backward of a sampled Fisher."""
        if self.sampled and self.curved is not None:
            self.curved.sampled_backward(outputs, likelihood="cross_entropy")

    def facts(self, step: int) -> dict[str, Any]:
        """What a training record tells about the optimizer."""
        group = self.optimizer.param_groups[0]
        facts: dict[str, Any] = {"lr": float(group["lr"])}
        if "momentum" in group:
            facts["momentum"] = float(group["momentum"])
        if self.damping is not None:
            facts["damping"] = float(self.damping(step))
        if self.curved is not None:
            facts |= curvature_facts(self.curved)
        return facts

    def close(self) -> None:
        """Remove hooks."""
        if self.curved is not None:
            self.curved.close()


def curvature_facts(curved: KFAC | SPNGD) -> dict[str, Any]:
    """So far: refreshes done and skipped, share of bytes refreshed, bytes moved."""
    summary = curved.refreshes()
    counts = summary["statistics"].values()
    return {
        "refreshed": sum(count["refreshed"] for count in counts),
        "skipped": sum(count["skipped"] for count in counts),
        "reduction": summary["reduction_rate"],
        "bytes": total_bytes(curved.traffic()),
    }


def total_bytes(traffic: dict[str, Any]) -> int:
    """Bytes this rank sent in all exchanges since the start."""
    return int(sum(each["sent"] for each in traffic["total"].values()))


def make(model: nn.Module, config: TrainConfig, *, examples: int) -> Method:
    """The method a config asks for, on a training set of ``examples``."""
    if config.optimizer.name == "spngd":
        return _spngd(model, config, examples)
    if config.optimizer.name == "polar":
        return _polar(model, config, examples)
    optimizer = _plain(model, config)
    if not config.optimizer.kfac:
        return Method(optimizer=optimizer)
    damping = make_damping(config, examples)
    kfac = KFAC(
        model,
        optimizer,
        damping=damping,
        refresh=make_refresh(config, examples),
        **_shared(config),
        **_rule(config),
    )
    sampled = config.curvature.fisher == "sampled"
    return Method(optimizer=optimizer, curved=kfac, damping=damping, sampled=sampled)


def _spngd(model: nn.Module, config: TrainConfig, examples: int) -> Method:
    damping = make_damping(config, examples)
    optimizer = SPNGD(
        model,
        lr=config.optimizer.lr,
        momentum=config.optimizer.momentum,
        weight_decay=config.optimizer.weight_decay,
        damping=damping,
        nesterov=config.optimizer.nesterov,
        average=config.optimizer.average,
        refresh=make_refresh(config, examples),
        rescale_weights=config.curvature.rescale_weights,
        **_shared(config),
        **_rule(config),
    )
    return Method(
        optimizer=optimizer,
        curved=optimizer,
        damping=damping,
        sampled=config.curvature.fisher == "sampled",
    )


def _polar(model: nn.Module, config: TrainConfig, examples: int) -> Method:
    damping = make_damping(config, examples)
    optimizer = Polar(
        model,
        lr=config.optimizer.lr,
        momentum=config.optimizer.momentum,
        weight_decay=config.optimizer.weight_decay,
        damping=damping,
        refresh=make_refresh(config, examples),
        **_shared(config),
    )
    return Method(optimizer=optimizer, curved=optimizer, damping=damping)


def _rule(config: TrainConfig) -> dict[str, Any]:
    """The keywords that compose an update rule of KFAC and SPNGD."""
    c = config.curvature
    names = ("statistics", "scale", "whitening", "basis", "moments", "rest", "kl_clip")
    names += ("damping_style", "fisher", "norm", "norm_damping_ratio")
    rule: dict[str, Any] = {name: getattr(c, name) for name in names}
    return rule if c.trust is None else rule | {"trust": c.trust}


def _shared(config: TrainConfig) -> dict[str, Any]:
    """The keywords that KFAC, SPNGD and Polar have in common."""
    curvature: CurvatureConfig = config.curvature
    names = ("decay", "subsample", "largest_factor", "placement", "rest_rate", "skip")
    shared: dict[str, Any] = {name: getattr(curvature, name) for name in names}
    # Adam's usual 0.999 remembers more steps than the short runs here have.
    shared["beta2"] = min(config.optimizer.beta2, 0.95)
    shared["comm"] = CommOptions(timeout=config.timeout)
    if curvature.strategy is not None:
        shared["strategy"] = curvature.strategy
    if config.data.name == "text":
        shared["loss"] = "tokens"
    return shared


def _plain(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Any optimizer that needs gradients only."""
    c = config.optimizer
    if c.trust or c.name == "muon":
        return _parted(model, c)
    return _made(model.parameters(), c)


def _made(params: Iterable[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    """What was asked for, on these parameters."""
    makers: dict[str, Maker] = {
        "sgd": _sgd,
        "adamw": _adamw,
        "muon": _muon,
        "soap": _soap,
        "shampoo": _shampoo,
    }
    make = partial(makers[c.name], c=c)
    return Flat(params, make) if c.flat or c.name == "muon" else make(params)


def _parted(model: nn.Module, c: OptimizerConfig) -> Optimizer:
    """Matrices by the rule that was asked for, the rest by a simple one."""
    matrices, rest = _by_shape(model)
    parts = [(_made(matrices, c), c.trust)] if matrices else []
    return Parts([*parts, (_rest(rest, c), False)] if rest else parts)


def _rest(params: list[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    if c.trust or c.rest == "adamw":
        betas = (c.momentum, min(c.beta2, 0.95))
        lr = c.rest_lr or REST_RATE * c.lr
        return torch.optim.AdamW(params, lr=lr, betas=betas, weight_decay=0)
    return _sgd(params, replace(c, lr=c.rest_lr or c.lr))


def _by_shape(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights that inputs multiply, and the rest: biases, norms and embeddings."""
    # Embeddings are tables of vectors: Muon's authors leave them to another rule.
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrix = {id(p): p.dim() >= 2 and id(p) not in tables for p in parameters}
    return (
        [p for p in parameters if matrix[id(p)]],
        [p for p in parameters if not matrix[id(p)]],
    )


def _sgd(params: Iterable[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    return torch.optim.SGD(
        params,
        lr=c.lr,
        momentum=c.momentum,
        nesterov=c.nesterov,
        weight_decay=c.weight_decay,
    )


def _adamw(params: Iterable[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    betas = (c.momentum, c.beta2)
    return torch.optim.AdamW(params, lr=c.lr, betas=betas, weight_decay=c.weight_decay)


def _muon(params: Iterable[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    return torch.optim.Muon(
        params, lr=c.lr, momentum=c.momentum, weight_decay=c.weight_decay
    )


def _soap(params: Iterable[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    return _borrowed("SOAP")(
        params,
        lr=c.lr,
        betas=(c.momentum, c.beta2),
        weight_decay=c.weight_decay,
        precondition_frequency=c.interval,
    )


def _shampoo(params: Iterable[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    # ScalableShampoo keeps Python objects in its state: no safe checkpoint of it.
    return _borrowed("Shampoo")(
        params,
        lr=c.lr,
        momentum=c.momentum,
        weight_decay=c.weight_decay,
        preconditioning_compute_steps=c.interval,
    )


def _borrowed(name: str) -> Any:
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise UserError(
            f"optimizer {name} comes from pytorch_optimizer, which cannot be imported "
            f"({error}). Install it with: pip install pytorch_optimizer"
        ) from error
    return getattr(pytorch_optimizer, name)
