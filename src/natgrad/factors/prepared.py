"""What is kept of a factor for its rule: made, packed for sending, and unpacked.

A prepared factor is a tuple of tensors: ``(X^-1,)`` (form ``"inverse"``), ``(W,)`` with
``W W^T = X^-1`` upper triangular (``"root"``), ``(X^-power,)`` (``"power"``), or the
eigenvectors and eigenvalues ``(Q, v)`` (``"eigen"``); of damped X, but for ``"eigen"``.
``"moment"`` is the statistic itself.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from natgrad.math.inverse import (
    Inverse,
    InverseError,
    damped_inverses,
    damped_powers,
    damped_roots,
    eigendecompositions,
)
from natgrad.math.packing import flatten, unflatten
from natgrad.math.parts import with_padding, without_padding
from natgrad.plan.spec import StatisticSpec

Found = Inverse | InverseError


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A factor to prepare.

    Attributes:
        matrix: ``(s, n, n)``, or ``(s, n)`` when diagonal.
        form: as in the module.
        damping: what is added to it; not for ``"eigen"``.
        power: of the form ``"power"``.
        earlier: an eigendecomposition to bring up to date, instead of a new one.
        parts, padding: see Note [Parts of a large factor].
    """

    matrix: Tensor
    form: str
    damping: float = 0.0
    power: float = 1.0
    earlier: Inverse | None = None
    parts: int = 1
    padding: int = 0

    def pieces(self) -> "list[Wanted]":
        """Without padding, which no solver sees: the last part may be smaller."""
        matrices = without_padding(self.matrix, self.parts, self.padding)
        earlier: list[Inverse | None] = [None] * len(matrices)
        if self.earlier is not None:
            cut = [without_padding(x, self.parts, self.padding) for x in self.earlier]
            earlier = list(zip(*cut, strict=True))
        return [
            replace(self, matrix=x, earlier=old, parts=1, padding=0)
            for x, old in zip(matrices, earlier, strict=True)
        ]


def prepare(wanted: Sequence[Wanted]) -> list[Found]:
    """Each in its form, or why there is none; all of one form together."""
    groups: dict[Hashable, list[int]] = {}
    for i, w in enumerate(wanted):
        groups.setdefault((w.form, w.power), []).append(i)
    results: dict[int, Found] = {}
    for members in groups.values():
        pieces = {i: wanted[i].pieces() for i in members}
        found = iter(_prepare_alike([p for each in pieces.values() for p in each]))
        for i, each in pieces.items():
            results[i] = _joined([next(found) for _ in each], wanted[i].parts)
    return [results[i] for i in range(len(wanted))]


def _joined(found: Sequence[Found], parts: int) -> Found:
    whole: list[Inverse] = []
    for each in found:
        if isinstance(each, InverseError):
            return each
        whole.append(each)
    return tuple(with_padding(x, parts) for x in zip(*whole, strict=True))


def _prepare_alike(wanted: Sequence[Wanted]) -> list[Found]:
    matrices, form = [w.matrix for w in wanted], wanted[0].form
    if form == "moment":
        return [(x.clone(),) for x in matrices]
    if form == "eigen":
        return eigendecompositions(matrices, [w.earlier for w in wanted])
    ways: dict[str, Callable[..., list[Tensor | InverseError]]] = {
        "inverse": damped_inverses,
        "root": damped_roots,
        "power": partial(damped_powers, power=wanted[0].power),
    }
    found = ways[form](matrices, [w.damping for w in wanted])
    return [x if isinstance(x, InverseError) else (x,) for x in found]


def pack(inverse: Inverse, form: str) -> Tensor:
    """A prepared factor as one vector: symmetric and triangular ones half as long."""
    if form == "eigen":
        return torch.cat([x.flatten() for x in inverse])
    return flatten(inverse[0])


def unpack(flat: Tensor, spec: StatisticSpec, form: str) -> Inverse:
    """The inverse of `pack`."""
    if form != "eigen":
        return (unflattened(flat, spec, form),)
    stack, size = spec.stack, spec.size
    vectors, values = flat.split([flat.numel() - stack * size, stack * size])
    if not spec.diagonal:
        vectors = vectors.reshape(stack, size, size)
    return vectors, values.reshape(stack, size)


def unflattened(flat: Tensor, spec: StatisticSpec, form: str) -> Tensor:
    """A dense inverse or root; of the root only the upper triangle was packed."""
    dense = unflatten(flat, spec.stack, spec.size, spec.diagonal)
    return dense.triu_() if form == "root" and dense.dim() == 3 else dense
