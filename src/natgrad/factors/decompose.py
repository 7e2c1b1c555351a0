"""From running averages to what preconditions: inverses, roots or eigenbases."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from natgrad.factors.state import StatisticState
from natgrad.math.inverse import (
    Inverse,
    InverseError,
    damped_inverses,
    damped_roots,
    eigendecompositions,
)
from natgrad.math.parts import with_padding, without_padding
from natgrad.options import Curvature
from natgrad.plan.spec import FACTORS, StatisticSpec

Found = Inverse | InverseError
Findings = dict[str, Found]
FORMS = ("eigen", "root", "inverse", "moment")


def form_of(spec: StatisticSpec, config: Curvature) -> str:
    """What is made of a statistic: one of `FORMS`; a "moment" is kept as it is."""
    if spec.kind in FACTORS:
        return config.form
    return "moment" if spec.kind == "S" else "inverse"


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Matrices of equal size that are solved together, and what they were before."""

    matrix: Tensor
    damping: float
    earlier: Inverse | None


def decompose(
    states: Sequence[StatisticState],
    config: Curvature,
    *,
    averages: Sequence[Tensor],
    dampings: Sequence[float],
) -> Findings:
    """What is made of each statistic's average, or why it cannot be, by name.

    The parts of a cut factor go without their padding, which no solver sees.
    """
    findings: Findings = {}
    given = list(zip(states, averages, dampings, strict=True))
    for form in FORMS:
        jobs = [
            (s.spec, _pieces(s, x, damping, config.basis == "tracked"))
            for s, x, damping in given
            if form_of(s.spec, config) == form
        ]
        found = iter(_solve(form, [piece for _, pieces in jobs for piece in pieces]))
        for spec, pieces in jobs:
            findings[spec.name] = _joined([next(found) for _ in pieces], spec)
    return findings


def _pieces(
    s: StatisticState, average: Tensor, damping: float, tracked: bool
) -> list[_Piece]:
    """Only a cut factor has more than one: its last part may be smaller."""
    spec = s.spec
    matrices = without_padding(average, spec.parts, spec.padding)
    before: Iterator[Inverse | None] = iter([None] * len(matrices))
    if tracked and s.inverse is not None:
        split = [without_padding(x, spec.parts, spec.padding) for x in s.inverse]
        before = zip(*split, strict=True)
    return [_Piece(matrix=x, damping=damping, earlier=next(before)) for x in matrices]


def _solve(form: str, pieces: Sequence[_Piece]) -> Sequence[Found]:
    matrices = [piece.matrix for piece in pieces]
    if form == "eigen":
        return eigendecompositions(matrices, [piece.earlier for piece in pieces])
    if form == "moment":
        return [(x.clone(),) for x in matrices]
    invert = damped_roots if form == "root" else damped_inverses
    inverses = invert(matrices, [piece.damping for piece in pieces])
    return [x if isinstance(x, InverseError) else (x,) for x in inverses]


def _joined(found: Sequence[Found], spec: StatisticSpec) -> Found:
    whole: list[Inverse] = []
    for each in found:
        if isinstance(each, InverseError):
            return each
        whole.append(each)
    return tuple(with_padding(x, spec.parts) for x in zip(*whole, strict=True))
