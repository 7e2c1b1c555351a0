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

from natgrad import KFAC, SPNGD, Adam, Options, Polar
from natgrad_lab.errors import UserError
from natgrad_lab.train.config import OptimizerConfig, TrainConfig
from natgrad_lab.train.flat import Flat
from natgrad_lab.train.options import options_of
from natgrad_lab.train.parts import Parts

# Of what has no trust ratio beside what has one.
assert isinstance(Polar.defaults.fallback, Adam)
REST_RATE = Polar.defaults.fallback.rate
Scaler = torch.amp.GradScaler | None
FOUND = ("damping", "ratio", "lr", "momentum")


class Maker(Protocol):
    """Makes an optimizer of parameters."""

    def __call__(
        self, params: Iterable[nn.Parameter], c: OptimizerConfig
    ) -> Optimizer: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """An update rule ready to step.

    ``curved`` is the object that estimates statistics (KFAC or SPNGD), if any. One that
    ``finds`` its rates takes closures.
    """

    optimizer: Optimizer
    curved: KFAC | SPNGD | None = None
    damping: Callable[[int], float] | None = None
    sampled: bool = False
    finds: bool = False

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
        return facts | self.found()

    def found(self) -> dict[str, float]:
        """Damping, reduction ratio, learning rate and momentum, if it finds them."""
        if not self.finds or self.curved is None:
            return {}
        health = self.curved.health()
        return {name: float(health[name]) for name in FOUND}

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


def make(
    model: nn.Module,
    config: TrainConfig,
    *,
    examples: int,
    grad_scaler: Scaler = None,
) -> Method:
    """The method a config asks for, on a training set of ``examples``."""
    if config.optimizer.alone:
        options = options_of(config, examples)
        kind = SPNGD if config.optimizer.name == "spngd" else Polar
        whole = kind(model, grad_scaler=grad_scaler, options=options)
        return _curved(whole, whole, options)
    optimizer = _plain(model, config)
    if not config.optimizer.kfac:
        return Method(optimizer=optimizer)
    options = options_of(config, examples)
    kfac = KFAC(model, optimizer, grad_scaler=grad_scaler, options=options)
    return _curved(optimizer, kfac, options)


def _curved(optimizer: Optimizer, curved: KFAC | SPNGD, options: Options) -> Method:
    if options.is_auto:
        return Method(optimizer=optimizer, curved=curved, finds=True)
    damping, sampled = options.damping, options.fisher == "sampled"
    assert callable(damping)
    return Method(optimizer=optimizer, curved=curved, damping=damping, sampled=sampled)


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
        betas = (c.usual_momentum, min(c.beta2, 0.95))
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
        momentum=c.usual_momentum,
        nesterov=bool(c.nesterov),
        weight_decay=c.usual_weight_decay,
    )


def _adamw(params: Iterable[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    betas = (c.usual_momentum, c.beta2)
    return torch.optim.AdamW(
        params, lr=c.lr, betas=betas, weight_decay=c.usual_weight_decay
    )


def _muon(params: Iterable[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    return torch.optim.Muon(
        params, lr=c.lr, momentum=c.usual_momentum, weight_decay=c.usual_weight_decay
    )


def _soap(params: Iterable[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    return _borrowed("SOAP")(
        params,
        lr=c.lr,
        betas=(c.usual_momentum, c.beta2),
        weight_decay=c.usual_weight_decay,
        precondition_frequency=c.interval,
    )


def _shampoo(params: Iterable[nn.Parameter], c: OptimizerConfig) -> Optimizer:
    # ScalableShampoo keeps Python objects in its state: no safe checkpoint of it.
    return _borrowed("Shampoo")(
        params,
        lr=c.lr,
        momentum=c.usual_momentum,
        weight_decay=c.usual_weight_decay,
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
