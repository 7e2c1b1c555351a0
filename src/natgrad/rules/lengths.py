"""How long a step is, and a weight: the KL clip, each layer's norm, rescaling."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from natgrad.engine.engine import Engine
from natgrad.layers import Block
from natgrad.math import foreach
from natgrad.math.precondition import kl_scale, rescale_factor
from natgrad.math.rules import moving_part, trust_ratio


def layer_trust(
    engine: Engine, updates: dict[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """With ``trust="layer"``, each layer's update at the norm of its weight and bias.

    So too the updates of matrices without a block that follow Adam's rule; vectors
    keep theirs. A layer whose ``gradients`` of this step are zero stays where it is:
    the ratio would make up for it that what is left in its average fades.
    """
    if engine.config.trust != "layer":
        return updates
    rows = {name: _rows(engine, engine.block[name]) for name in updates}
    names = [name for name in updates if rows[name]]
    if not names:
        return updates
    sizes = _stacked(foreach.norms([updates[name] for name in names]), engine.like)
    peaks = _stacked(foreach.peaks([gradients[name] for name in names]), engine.like)
    counts = _vector(tuple(rows[n] for n in names), sizes.dtype, sizes.device)
    blocks = [engine.block[name] for name in names]
    norms, shares = _weight_norms(blocks, updates, engine.like)
    ratios = trust_ratio(norms, sizes, counts * shares)
    ratios = torch.where(peaks > 0, ratios, 0.0)
    chosen = [updates[name] for name in names]
    factors = [r.to(u) for r, u in zip(ratios.unbind(), chosen, strict=True)]
    return updates | dict(zip(names, foreach.multiplied(chosen, factors), strict=True))


def _rows(engine: Engine, block: Block) -> int:
    """How many outputs the weight has; 0: its update keeps its length."""
    if block.is_factored:
        return block.spec.stack * block.spec.rows
    dims = [size for size in block.parameters[0].shape if size > 1]
    is_matrix = block.kind is None and len(dims) > 1
    return dims[0] if is_matrix and engine.preconditioner.is_adaptive(block) else 0


def _stacked(numbers: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack([x.to(like) for x in numbers])


@lru_cache(maxsize=64)
def _vector(
    values: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Kept: to copy numbers to a GPU is to wait for it."""
    return torch.tensor(values, dtype=dtype, device=device)


def _weight_norms(
    blocks: Sequence[Block], updates: Mapping[str, Tensor], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each block's weight and bias together, and which share of it moves.

    Each rank has the whole weight, whoever else works on the block.
    """
    weights = foreach.norms([b.parameters[0].detach() for b in blocks])
    biases = [b.parameters[-1].detach() for b in blocks if len(b.parameters) > 1]
    found = iter(foreach.norms(biases) if biases else [])
    one, zero = like.new_ones(()), like.new_zeros(())
    bias = [next(found) if len(b.parameters) > 1 else zero for b in blocks]
    shares = [one] * len(blocks)
    for i, b in enumerate(blocks):
        if b.is_table:
            weight = b.fold([b.parameters[0].detach()])
            weights[i], shares[i] = moving_part(weight, updates[b.name])
    norms = torch.hypot(_stacked(weights, like), _stacked(bias, like))
    return norms, _stacked(shares, like)


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
