"""How long a step is: the KL clip of all layers, or the norm of each layer's weight."""

from collections.abc import Mapping

import torch
from torch import Tensor

from natgrad.engine import Engine
from natgrad.math import foreach
from natgrad.math.precondition import kl_scale
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
    # each rank has the whole weight, whoever else works on the block
    weights = [p.detach() for b in blocks for p in b.parameters]
    squares = iter([x.square() for x in foreach.norms(weights)])
    sizes = foreach.norms([updates[name] for name in names])
    scaled = dict(updates)
    for block, size in zip(blocks, sizes, strict=True):
        norm = torch.stack([next(squares).to(size) for _ in block.parameters])
        ratio = trust_ratio(norm.sum().sqrt(), size, block.spec.stack * block.spec.rows)
        scaled[block.name] = updates[block.name] * ratio
    return scaled


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
