"""How long a step is, and a weight: the KL clip, each layer's norm, rescaling."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from natgrad.engine import Engine
from natgrad.layers import Block
from natgrad.math import foreach
from natgrad.math.precondition import kl_scale, rescale_factor
from natgrad.math.rules import trust_ratio


def layer_trust(engine: Engine, updates: dict[str, Tensor]) -> dict[str, Tensor]:
    """With ``trust="layer"``, each layer's update at the norm of its weight and bias.

    Norms and parameters without a block keep their update.
    """
    if engine.config.trust != "layer":
        return updates
    names = [name for name in updates if engine.block[name].is_factored]
    if not names:
        return updates
    blocks = [engine.block[name] for name in names]
    sizes = torch.stack(foreach.norms([updates[name] for name in names]))
    counts = tuple(b.spec.stack * b.spec.rows for b in blocks)
    rows = _vector(counts, sizes.dtype, sizes.device)
    ratios = trust_ratio(_weight_norms(blocks, sizes), sizes, rows)
    scaled = foreach.multiplied([updates[name] for name in names], ratios.unbind())
    return updates | dict(zip(names, scaled, strict=True))


@lru_cache(maxsize=64)
def _vector(
    values: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Kept: to copy numbers to a GPU is to wait for it."""
    return torch.tensor(values, dtype=dtype, device=device)


def _weight_norms(blocks: Sequence[Block], like: Tensor) -> Tensor:
    """Of each block's weight and bias together.

    Each rank has the whole weight, whoever else works on the block.
    """
    biased = [len(b.parameters) > 1 for b in blocks]
    weights = foreach.norms([b.parameters[0].detach() for b in blocks])
    if not any(biased):
        return torch.stack(weights).to(like)
    last = [b.parameters[-1].detach() for b in blocks if len(b.parameters) > 1]
    found, zero = iter(foreach.norms(last)), like.new_zeros(())
    biases = [next(found) if has else zero for has in biased]
    return torch.hypot(torch.stack(weights).to(like), torch.stack(biases).to(like))


def kl_trust(
    engine: Engine,
    directions: Mapping[str, Tensor],
    updates: Mapping[str, Tensor],
    lr: float,
) -> Tensor | None:
    """With ``trust="kl"``, nu (Pauloski et al., eq. 18), the same on all ranks."""
    config = engine.config
    if config.trust != "kl" or config.kl_clip is None:
        return None
    products = [
        torch.dot(updates[name].flatten(), directions[name].flatten()).abs()
        for name in updates
        if engine.block[name].kind is not None
        # several ranks may work on a block: the first counts it
        and engine.plan.workers[name][0] == engine.comm.rank
    ]
    total = engine.comm.agree(sum(products, start=engine.like.new_zeros(1)))[0]
    return kl_scale(total, config.kl_clip, lr)


def rescale(blocks: Sequence[Block]) -> list[Tensor]:
    """Bring weights to norm sqrt(2 d_out) (SP-NGD, eq. 24); returns their changes."""
    weights: list[Tensor] = [b.parameters[0].detach() for b in blocks]
    if not weights:
        return []
    before = [w.clone() for w in weights]
    factors = [
        rescale_factor(norm, b.spec.stack * b.spec.rows)
        for b, norm in zip(blocks, foreach.norms(weights), strict=True)
    ]
    foreach.multiply_(weights, factors)
    return foreach.subtract(weights, before)
