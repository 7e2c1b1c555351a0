"""What an update rule is: the interface that every rule, ours or a user's, implements.

Letters: s is the stack, m rows (outputs), n columns (inputs) of a matrix; k matrices of
equal shape are scaled together, as one tensor ``(k s, m, n)``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from natgrad.math.inverse import Inverse
from natgrad.math.packing import Packing
from natgrad.math.rules import mean_of_entries
from natgrad.requiring import require_choice

Sides = Literal["both", "inputs", "outputs", "none"]
Source = Literal["activations", "gradients"]
Style = Literal["eigen", "factored", "relative", "whole", "root"]
Basis = Literal["exact", "tracked"]
MovedMoments = Literal["move", "keep", "restart"]
Form = Literal["eigen", "inverse", "root", "power"]


def projected(image: Tensor, project: Callable[[], Tensor]) -> Tensor:
    """That of the direction itself. See `Matrices.average`."""
    return project()


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """k matrices of equal shape, as a rule sees them.

    Attributes:
        direction: ``(k s, m, n)``: what is scaled, the gradients or an average of them.
        gradient: ``(k s, m, n)``: this step's gradients. The direction itself for a
            rule that keeps no second moment.
        count: k.
        right, left: the prepared factors of the inputs' and of the outputs' side, in
            the rule's `Rule.form`; None if there is none, or none yet.
        known: whether no factor is missing.
        damping: lambda.
        curvature: the second moment ``(k s, m n)`` of per-example gradients in the
            eigenbases, for a rule that asks for it (`Rule.corrects`).
        moment: adds the squares of a tensor of the rule's `Rule.moment_shape`, of k
            matrices, to running averages with a decay; returns those without bias.
        average: the direction under a linear map that stays the same from refresh to
            refresh, such as a change of basis: of this step's gradient under that map,
            and a function that maps the direction. That is not called where the
            direction of the step before is known under the map.
        mean: the mean ``(k s, 1, 1)`` over the entries of each, also of entries that
            other ranks of a sharded model have.
    """

    direction: Tensor
    gradient: Tensor
    count: int
    right: Inverse | None
    left: Inverse | None
    known: bool
    damping: float
    curvature: Tensor | None
    moment: Callable[[Tensor, float], Tensor]
    # by factories: a function as the class's own attribute would be a method of it
    average: Callable[[Tensor, Callable[[], Tensor]], Tensor] = field(
        default_factory=lambda: projected
    )
    mean: Callable[[Tensor], Tensor] = field(default_factory=lambda: mean_of_entries)

    @property
    def bases(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors of the right and left factors; empty for the identity."""
        empty = self.direction.new_empty(0)
        right = self.right[0] if self.right else empty
        return right, (self.left[0] if self.left else empty)


class Rule(ABC):
    """How the factors of a matrix turn a direction into an update.

    A rule is a frozen dataclass with its own options. What it needs of a matrix it says
    in the attributes below; `apply` is a pure function of tensors.
    """

    name: ClassVar[str]
    """What checkpoints and reports call it."""
    natural: ClassVar[bool] = False
    """Whether the update is a natural gradient, of which there is a KL divergence."""
    adapts: ClassVar[bool] = False
    """Whether it keeps a running second moment of its gradients."""
    projects: ClassVar[bool] = False
    """Whether it asks for `Matrices.average`, which is kept between refreshes then."""
    corrects: ClassVar[bool] = False
    """Whether it needs the second moment of per-example gradients in the bases."""
    descends: ClassVar[bool] = False
    """Whether no rounding can turn the update uphill: each entry of the direction is
    multiplied by a positive number, or each singular value becomes another one."""

    sides: Sides = "both"
    """Which factors it needs: of the inputs, of the outputs, both or none."""
    source: Source = "activations"
    """What factors are estimated from: a layer's inputs and output gradients, or the
    weight's own gradient, ``G^T G`` and ``G G^T``, which needs no layer."""
    power: float | None = None
    """Of the form ``"power"``: a factor X is prepared as ``(X + damping I)^-power``."""
    style: Style = "factored"
    """How the damping enters a factor (see `Kronecker`)."""
    basis: Basis = "exact"
    """How eigenbases are made (see `Kronecker`)."""
    moments: MovedMoments = "move"
    """What becomes of second moments when their bases are replaced."""
    late: bool = False
    """Whether a step uses the factors of the steps before it (see `EigenAdam`)."""

    @property
    def form(self) -> Form:
        """What is prepared of a factor: its eigenbasis, damped inverse, root, power."""
        return "inverse"

    @property
    def packing(self) -> Packing | None:
        """How what is prepared is kept between steps, to be unpacked when applied.

        It takes half of the memory; None: it is kept as it is applied.
        """
        return None

    def moment_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int] | None:
        """Of the second moment that is kept of a matrix ``(s, m, n)``; None: none."""
        return shape if self.adapts else None

    @abstractmethod
    def apply(self, x: Matrices) -> Tensor:
        """The updates ``(k s, m, n)`` of k matrices of equal shape."""

    def spec(self) -> dict[str, Any]:
        """The rule as plain data, for checkpoints and for other ranks to compare."""
        options = {f.name: getattr(self, f.name) for f in fields(self)}  # pyright: ignore[reportArgumentType]
        return {"name": self.name, **options}


def require_choices(rule: Any, **legal: Any) -> None:
    """Raise unless each named field of a rule is one of a `Literal`'s values."""
    for name, choices in legal.items():
        require_choice(name, getattr(rule, name), get_args(choices))
