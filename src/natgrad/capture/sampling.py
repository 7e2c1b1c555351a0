"""Losses of labels drawn from the model, for the sampled Fisher (SP-NGD, eq. 5)."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from natgrad.capture.recorder import Capture
from natgrad.layers import Block
from natgrad.requiring import require_choice

LIKELIHOODS = ("cross_entropy", "mse")


def sampled_loss(
    outputs: Tensor, likelihood: str, targets: Tensor | None, reduction: str
) -> Tensor:
    """The loss of one Monte Carlo label an output, reduced as the training loss is.

    ``"cross_entropy"``: outputs are logits, classes in dim 1 as for
    `torch.nn.functional.cross_entropy`. ``"mse"``: the likelihood whose negative
    logarithm is `torch.nn.functional.mse_loss` of one term of the loss, a Gaussian
    around the outputs with variance d / 2 for d outputs an example (for d outputs a
    token, the last dim, if the loss is a mean over tokens). ``targets`` replaces the
    draw.
    """
    require_choice("likelihood", likelihood, LIKELIHOODS)
    how = "sum" if reduction == "sum" else "mean"
    if likelihood == "cross_entropy":
        labels = draw_classes(outputs) if targets is None else targets
        return F.cross_entropy(outputs, labels, reduction=how)
    shape = outputs.shape
    each = shape[-1] if reduction == "tokens" else math.prod(shape[1:])
    labels = draw_gaussian(outputs, each) if targets is None else targets
    loss = F.mse_loss(outputs, labels)
    # A "sum" of mse losses is over examples; each is a mean over its own outputs.
    return loss * len(outputs) if reduction == "sum" else loss


def draw_classes(logits: Tensor) -> Tensor:
    """A class for each position, drawn from the softmax over dim 1."""
    last = logits.detach().movedim(1, -1) if logits.dim() > 1 else logits.detach()
    rows = torch.softmax(last.float(), dim=-1).reshape(-1, last.shape[-1])
    return torch.multinomial(rows, 1).reshape(last.shape[:-1])


def draw_gaussian(outputs: Tensor, each: int) -> Tensor:
    """Outputs plus noise of variance d / 2, for d outputs ``each``."""
    return outputs.detach() + torch.randn_like(outputs) * (each / 2) ** 0.5


def drawn_backward(
    capture: Capture,
    blocks: Iterable[Block],
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None = None,
) -> None:
    """Backward of what was drawn, layers' hooks and all; ``.grad`` and graph stay.

    From losses, or from outputs at which the ``gradients`` are known.
    """
    layers = [b for b in blocks if b.kind is not None]
    weights = [p for p in (b.parameters[0] for b in layers) if p.requires_grad]
    if not weights:
        return
    with capture.meter("sampled"), capture.sampling():
        torch.autograd.grad(
            outputs, weights, gradients, retain_graph=True, allow_unused=True
        )
