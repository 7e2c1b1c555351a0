"""Brute force: what K-FAC's statistics and steps are, an example at a time.

Nothing here uses natgrad. Statistics come from a loop over examples and positions,
inverses from dense solves of explicit Kronecker products, in the dtype of the model
(tests use float64). Slow and plain on purpose.

Shapes are the library's: a layer's gradient is a stack ``(s, m, n)`` of matrices with
m outputs and n inputs, a bias being the last input.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(kw_only=True)
class Example:
    """One example's own loss, seen at one layer.

    Attributes:
        inputs: ``(s, t, n)``: for each use of the weight, what it multiplies.
        outputs: ``(s, t, m)``: the gradients of the example's loss at the outputs.
        gradient: ``(s, m, n)``: of the example's loss, by autograd at the parameters.
    """

    inputs: Tensor
    outputs: Tensor
    gradient: Tensor

    def reduced(self) -> "Example":
        """One use of the weight: inputs averaged, gradients summed."""
        return Example(
            inputs=self.inputs.mean(1, keepdim=True),
            outputs=self.outputs.sum(1, keepdim=True),
            gradient=self.gradient,
        )


def examples(
    model: nn.Module,
    layers: str | Iterable[str],
    x: Tensor,
    y: Tensor,
    criterion: Criterion = F.cross_entropy,
) -> list[Example]:
    """Every example of a batch at a layer (or at several that share one weight)."""
    names = [layers] if isinstance(layers, str) else list(layers)
    frozen = with_batch_statistics(model, x)
    return [
        _example(frozen, names, x[i : i + 1], y[i : i + 1], criterion)
        for i in range(len(x))
    ]


def with_batch_statistics(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy whose batch norms in training mode use, as constants, the batch's own."""
    frozen = copy.deepcopy(model)
    for module in frozen.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        if isinstance(module, BATCH_NORMS) and module.training:
            module.register_forward_hook(_freeze)
    with torch.no_grad():
        frozen(x)
    for module in frozen.modules():
        module._forward_hooks.clear()
    return frozen


def _freeze(module: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> None:
    assert isinstance(module, BATCH_NORMS)
    channels = args[0].transpose(0, 1).flatten(1)
    mean = torch.stack([c.sum() / c.numel() for c in channels])
    variance = torch.stack([((c - c.mean()) ** 2).mean() for c in channels])
    module.running_mean, module.running_var = mean, variance
    module.track_running_stats = True
    module.eval()


def _example(
    model: nn.Module, names: list[str], x: Tensor, y: Tensor, criterion: Criterion
) -> Example:
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    modules = [model.get_submodule(name) for name in names]

    def record(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        calls.append((module, args[0], out))

    handles = [m.register_forward_hook(record) for m in modules]
    # Outputs that a later in-place layer overwrites have no gradient of their own.
    copying = [
        m.register_forward_hook(lambda _m, _a, out: out.clone()) for m in modules
    ]
    loss = criterion(model(x), y)
    for handle in (*handles, *copying):
        handle.remove()
    parameters = trained(modules[0])
    wanted = [*parameters, *(out for _, _, out in calls)]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    filled = [
        torch.zeros_like(w) if g is None else g
        for w, g in zip(wanted, grads, strict=True)
    ]
    own, outputs = filled[: len(parameters)], filled[len(parameters) :]
    gradient = as_stack(modules[0], own)
    if isinstance(modules[0], NORMS):
        return Example(inputs=x, outputs=x, gradient=gradient)
    uses = [use_of(m, a, g) for (m, a, _), g in zip(calls, outputs, strict=True)]
    inputs, grads_out = (torch.cat(part, 1) for part in zip(*uses, strict=True))
    return Example(inputs=inputs.detach(), outputs=grads_out, gradient=gradient)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Weight and bias, as far as they are trained."""
    found = (getattr(module, name, None) for name in ("weight", "bias"))
    return [p for p in found if isinstance(p, nn.Parameter) and p.requires_grad]


def as_stack(module: nn.Module, tensors: list[Tensor]) -> Tensor:
    """Tensors shaped like weight and bias as ``(s, m, n)``."""
    weight, *bias = tensors
    if isinstance(module, NORMS):
        return torch.stack([t.flatten() for t in tensors], -1).unsqueeze(1)
    if isinstance(module, nn.Embedding):
        return weight.T.unsqueeze(0)
    if type(module).__name__ == "Conv1D":  # of transformers: (inputs, outputs)
        weight = weight.T
    groups = getattr(module, "groups", 1)
    stack = weight.reshape(groups, len(weight) // groups, -1)
    columns = [b.reshape(groups, -1, 1) for b in bias]
    return torch.cat([stack, *columns], 2)


def use_of(module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs ``(s, t, n)`` and output gradients ``(s, t, m)`` of one call."""
    if isinstance(module, CONVOLUTIONS):
        inputs = patches(module, a)
        outputs = g[0].reshape(module.groups, -1, g[0, 0].numel()).mT
    elif isinstance(module, nn.Embedding):
        one_hot = F.one_hot(a.flatten(), module.num_embeddings).to(g.dtype)
        keep = torch.ones(a.numel(), 1, dtype=g.dtype)
        if module.padding_idx is not None:
            keep[a.flatten() == module.padding_idx] = 0
        inputs = (one_hot * keep).unsqueeze(0)
        outputs = (g.reshape(a.numel(), -1) * keep).unsqueeze(0)
    else:
        inputs = a.reshape(1, -1, a.shape[-1])
        outputs = g.reshape(1, -1, g.shape[-1])
    if len(trained(module)) == 2:
        inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)
    return inputs, outputs


def patches(conv: nn.Module, a: Tensor) -> Tensor:
    """What a convolution reads of one example at each output: ``(s, t, n)``."""
    assert isinstance(conv, CONVOLUTIONS)
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    if conv.padding == "same":
        sides = [(r // 2, r - r // 2) for r in reach]
    elif conv.padding == "valid":
        sides = [(0, 0) for _ in reach]
    else:
        sides = [(int(p), int(p)) for p in conv.padding]
    flat = [p for pair in reversed(sides) for p in pair]
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    padded = F.pad(a, flat, mode=mode)
    starts = [
        range(0, size - r, step)
        for size, r, step in zip(padded.shape[2:], reach, conv.stride, strict=True)
    ]
    read = []
    for start in itertools.product(*starts):
        window = tuple(
            slice(q, q + r + 1, d)
            for q, r, d in zip(start, reach, conv.dilation, strict=True)
        )
        read.append(padded[(0, slice(None), *window)].reshape(conv.groups, -1))
    return torch.stack(read, 1)


def factors(batch: list[Example], *, reduce: bool = False) -> tuple[Tensor, Tensor]:
    """A is a mean over examples and uses, G a sum over uses, a mean over examples."""
    batch = [e.reduced() for e in batch] if reduce else batch
    rows = [a for e in batch for a in e.inputs.unbind(1)]
    a_factor = _sum(outer(a) for a in rows) / len(rows)
    g_factor = _sum(outer(g) for e in batch for g in e.outputs.unbind(1)) / len(batch)
    return a_factor, g_factor


def norm_statistic(batch: list[Example], form: str) -> Tensor:
    """Means: unit ``(c, p, p)``, diag ``(1, c p)`` or full ``(1, c p, c p)``."""
    grads = [e.gradient[:, 0] for e in batch]
    if form == "unit":
        return _sum(outer(g) for g in grads) / len(grads)
    full = _sum(outer(g.reshape(1, -1)) for g in grads) / len(grads)
    return full if form == "full" else full.diagonal(dim1=1, dim2=2)


def exact_fisher(batch: list[Example]) -> Tensor:
    """The mean of each example's whole gradient's outer product: ``(s, mn, mn)``."""
    return _sum(outer(e.gradient.flatten(1)) for e in batch) / len(batch)


def outer(x: Tensor) -> Tensor:
    """``(s, n) -> (s, n, n)``."""
    return x.unsqueeze(2) * x.unsqueeze(1)


def kronecker(left: Tensor, right: Tensor) -> Tensor:
    """``(s, m, m)`` and ``(s, n, n)`` (or diagonals ``(s, n)``) -> ``(s, mn, mn)``."""
    return torch.stack(
        [torch.kron(a, b) for a, b in zip(as_dense(left), as_dense(right), strict=True)]
    )


def as_dense(statistic: Tensor) -> Tensor:
    """A diagonal ``(s, n)`` as a matrix."""
    return statistic.diag_embed() if statistic.dim() == 2 else statistic


def solve(fisher: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """``(F + damping I)^-1 g`` for F ``(s, mn, mn)`` and g ``(s, m, n)``."""
    eye = torch.eye(fisher.shape[-1], dtype=fisher.dtype)
    flat = gradient.reshape(len(fisher), -1, 1)
    return torch.linalg.solve(fisher + damping * eye, flat).reshape(gradient.shape)


def solve_factored(a: Tensor, g: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """``((G + sqrt(lambda) / pi I) kron (A + pi sqrt(lambda) I))^-1`` times g.

    pi^2 is the ratio of the mean eigenvalues of A and G over the whole stack.
    """
    a, g = as_dense(a), as_dense(g)
    mean_a = torch.linalg.eigvalsh(a).mean()
    mean_g = torch.linalg.eigvalsh(g).mean()
    pi = (mean_a / mean_g).sqrt()
    right = a + pi * damping**0.5 * torch.eye(a.shape[-1], dtype=a.dtype)
    left = g + damping**0.5 / pi * torch.eye(g.shape[-1], dtype=g.dtype)
    return solve(kronecker(left, right), gradient, 0.0)


def trained_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that have a weight to train."""
    for name, module in model.named_modules():
        if "weight" in dict(module.named_parameters(recurse=False)):
            yield name, module


def near(
    actual: Tensor | None, expected: Tensor, *, rtol: float = 1e-11, atol: float = 1e-13
) -> None:
    """Equal up to rounding in float64, in shape and dtype too."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum(0)
