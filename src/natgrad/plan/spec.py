"""Names and shapes of blocks and statistics: all a plan needs to know of a model.

A block's gradient is a stack ``(s, m, n)``: s independent matrices of m rows
(outputs) and n columns (inputs, the bias last). A statistic on the right acts on n,
one on the left on m; it is ``(s, n, n)``, or ``(s, n)`` when diagonal. ``S``, the
second moment in the eigenbases of both, is diagonal with size m * n.

Note [Parts of a large factor]
A factor that is too large keeps only its diagonal blocks: n rows are cut into ``parts``
of ``size`` rows each, in order, and the statistic is the stack ``(s * parts, size,
size)`` of them. So everything that handles stacks of matrices handles it as it is. The
last part may be shorter: its last ``padding`` rows and columns stand for nothing. They
are zero in the statistic and in its inverse, and no eigenvalue is counted for them.

Note [One factor of several matrices]
The matrices of a block may have the same inputs, as Q, K and V of one weight have. Then
one factor on the right is that of all: it is ``shared``, estimated, kept, sent and
inverted once, and its stack is 1 (or its parts), whatever the block's is.

Note [Inputs of each matrix]
Each expert of a layer has inputs of its own, and in some batches none. Its statistics
are ``counted``: A is the mean over its own inputs, and a matrix that has none in a
batch keeps both A and G as they are. G stays a mean over all examples, so that
``G kron A`` is the Fisher's block of a weight that most examples do not use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from natgrad.math.packing import Packing
from natgrad.plan.shards import Cut

FLOAT_BYTES = 4
# Factors of a layer's inputs and output gradients, and of the weight's own gradient:
# G^T G on the right and G G^T on the left.
ACTIVATIONS = ("A", "G")
GRADIENTS = ("R", "L")
FACTORS = (*ACTIVATIONS, *GRADIENTS)
KINDS = (*FACTORS, "S", "unit", "diag", "full")
SIDES = ("right", "left", "both")


def _positive(owner: str, **values: int) -> None:
    for key, value in values.items():
        if value < 1:
            raise ValueError(f"Invalid {key}={value} of {owner!r}. Must be >= 1.")


@dataclass(frozen=True, kw_only=True)
class StatisticSpec:
    """One statistic, named ``block/kind`` (for example ``layer1.0.conv1/A``).

    ``eigen``: whether a factor is kept as an eigendecomposition; None: as the plan's
    ``inverse`` says for all. ``packing``: whether what is prepared of a factor is
    kept packed between steps, an upper triangular or a symmetric matrix. ``parts`` and
    ``padding``: see Note [Parts of a large factor]; ``shared``: Note [One factor of
    several matrices]; ``counted``: Note [Inputs of each matrix].
    """

    name: str
    block: str
    kind: str
    side: str
    stack: int
    size: int
    diagonal: bool = False
    eigen: bool | None = None
    packing: Packing | None = None
    parts: int = 1
    padding: int = 0
    shared: bool = False
    counted: bool = False

    def __post_init__(self) -> None:
        _positive(self.name, stack=self.stack, size=self.size, parts=self.parts)
        if self.kind not in KINDS:
            raise ValueError(f"Invalid kind={self.kind!r}. Must be one of {KINDS}.")
        if self.side not in SIDES:
            raise ValueError(f"Invalid side={self.side!r}. Must be one of {SIDES}.")

    @cached_property
    def is_factor(self) -> bool:
        """Whether it is a factor of one side of a matrix."""
        return self.kind in FACTORS

    @cached_property
    def is_local(self) -> bool:
        """Whether its owner makes it of the reduced gradient: it never moves."""
        return self.kind in GRADIENTS

    @cached_property
    def rows(self) -> int:
        """Rows of each whole matrix, of which the stack holds the parts."""
        return self.parts * self.size - self.padding

    @cached_property
    def eigenvalues(self) -> int:
        """How many the whole stack has; none for padding.

        Of a counted A those of one matrix: an input is that of one alone.
        """
        one = self.counted and self.side == "right"
        return self.rows * (1 if one else self.stack // self.parts)

    @cached_property
    def elements(self) -> int:
        """Elements as held in memory: whole matrices, or their diagonals."""
        return self.stack * self.size * (1 if self.diagonal else self.size)

    @cached_property
    def packed(self) -> int:
        """Elements as sent: upper triangles (SP-NGD, section 5.2) or diagonals."""
        rows = 2 if self.diagonal else self.size + 1
        return self.stack * (self.size * rows // 2)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One block. Without statistics it is a plain parameter, not preconditioned.

    ``elementwise``: its rule takes each entry alone. ``cuts``: of a sharded model, how
    each of its parameters is cut; see Note [Pieces] in `shards`.
    """

    name: str
    stack: int
    rows: int
    cols: int
    statistics: tuple[StatisticSpec, ...] = ()
    elementwise: bool = False
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        _positive(self.name, stack=self.stack, rows=self.rows, cols=self.cols)
        for spec in self.statistics:
            sizes = {"right": self.cols, "left": self.rows}
            rows = sizes.get(spec.side, self.rows * self.cols)
            stack = (1 if spec.shared else self.stack) * spec.parts
            if (spec.block, spec.stack, spec.rows) != (self.name, stack, rows):
                raise ValueError(
                    f"Invalid statistic {spec.name!r} of block {self.name!r}. Must "
                    f"have block={self.name!r}, stack={stack}, rows={rows}."
                )

    @cached_property
    def elements(self) -> int:
        """Elements of the block's gradient."""
        return self.stack * self.rows * self.cols

    def held(self, rank: int) -> int:
        """Elements that a rank has of the parameters of a block that is cut."""
        return sum(cut.on(rank) for cut in self.cuts)

    @cached_property
    def copies(self) -> int:
        """How many ranks hold each piece of its first parameter."""
        return self.cuts[0].copies if self.cuts else 1

    @cached_property
    def largest(self) -> int:
        """Rows of the largest factor from activations; 1 without any."""
        sizes = (s.size for s in self.statistics if s.kind in ACTIVATIONS)
        return max(sizes, default=1)
