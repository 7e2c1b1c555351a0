"""Updates of rules, through `torch.compile` if that is asked for.

Note [Compiled updates]
A rule is run once on tensors without data, which records what torch does to matrices of
these shapes. What it asked Python for, as sizes and tuned constants, is settled then,
and the recording alone is compiled: one graph for each group of blocks. Numbers that
change while training, the damping and the age of second moments, are its arguments, and
the learning rate comes later, so nothing is compiled again for them.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from natgrad.math.rules import mean_of_entries, mean_of_squares
from natgrad.rules.rule import Matrices, Rule, projected

Graph = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Aged:
    """The second moment ``square`` of a group, and how many steps are in it now."""

    square: Tensor
    steps: int


class Compiled:
    """``update(rule, matrices)`` by one compiled graph for each rule and shape.

    ``backend`` is one of torch's compilers: "inductor", "aot_eager", ...
    """

    def __init__(
        self, backend: str, update: Callable[[Rule, Matrices], Tensor]
    ) -> None:
        self.backend, self.update = backend, update
        self._graphs: dict[Hashable, Graph] = {}

    def __call__(self, rule: Rule, x: Matrices, aged: Aged | None) -> Tensor:
        """The updates of x, whose second moment ``aged`` is brought up to date.

        ``x.moment`` and ``x.mean``, which may need other ranks, are not called.
        """
        parts = _parts_of(x, aged)
        steps = 0 if aged is None else aged.steps
        numbers = torch.tensor([x.damping, steps], dtype=torch.float64)
        tensors = [numbers, *(t for part in parts for t in part)]
        key = rule, x.count, x.known, *map(len, parts), *map(_looks, tensors)
        if key not in self._graphs:
            self._graphs[key] = self._compile(rule, x, parts, tensors)
        return self._graphs[key](*tensors)

    def _compile(
        self,
        rule: Rule,
        x: Matrices,
        parts: Sequence[Sequence[Tensor]],
        tensors: Sequence[Tensor],
    ) -> Graph:
        # not with the library: few ask for this, and all would wait for it
        from torch.fx.experimental.proxy_tensor import make_fx

        def run(numbers: Tensor, *given: Tensor) -> Tensor:
            rest = list(given)
            cut = [[rest.pop(0) for _ in part] for part in parts]
            return self.update(rule, _seen(x, numbers, cut))

        # a moment must not be brought up to date twice
        copies = [t.clone(memory_format=torch.preserve_format) for t in tensors]
        run(*copies)  # constants that a process finds once are found with numbers
        try:
            # as functions: what is written to a part of a tensor is not compiled
            pure = torch.func.functionalize(run)
            recorded = make_fx(pure, tracing_mode="fake", _allow_non_fake_inputs=True)(
                *tensors
            )
            how: dict[str, Any] = {"backend": self.backend, "dynamic": False}
            graph = cast(Any, torch.compile(recorded, fullgraph=True, **how))
            # now, also in a step that estimates, when a model is not compiled
            with torch.compiler.set_stance("default"):
                graph(*copies)
        except Exception as error:
            raise RuntimeError(
                f"Invalid compile={self.backend!r}: {rule!r} could not be compiled "
                f"({type(error).__name__}: {str(error).strip().splitlines()[0]}). "
                "Must be None where torch.compile has no compiler."
            ) from error
        return graph


def _parts_of(x: Matrices, aged: Aged | None) -> list[tuple[Tensor, ...]]:
    """The tensors of x: direction, gradient, right, left, curvature, second moment."""
    same = x.gradient is x.direction
    optional = (x.curvature, None if aged is None else aged.square)
    return [
        (x.direction,),
        () if same else (x.gradient,),
        x.right or (),
        x.left or (),
        *(() if part is None else (part,) for part in optional),
    ]


def _seen(x: Matrices, numbers: Tensor, parts: Sequence[list[Tensor]]) -> Matrices:
    """As x, but of these tensors."""
    (direction,), gradient, right, left, curvature, square = parts
    damping, steps = numbers.unbind()

    def moment(gradients: Tensor, beta2: float) -> Tensor:
        return mean_of_squares(square[0], gradients, beta2, steps)

    return replace(
        x,
        direction=direction,
        gradient=gradient[0] if gradient else direction,
        right=tuple(right) or None,
        left=tuple(left) or None,
        damping=cast(float, damping),
        curvature=curvature[0] if curvature else None,
        moment=moment,
        average=projected,
        mean=mean_of_entries,
    )


def _looks(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype, x.device
