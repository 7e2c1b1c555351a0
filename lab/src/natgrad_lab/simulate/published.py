"""Published measurements, and the profile numbers fitted to a few of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from natgrad.plan import Plan, make_plan
from natgrad.plan.autotune import Curve
from natgrad_lab.simulate.work import work_of

Row = tuple[str, int]

EIGEN_MS: dict[Row, float] = {
    ("resnet50", 16): 2256.64,
    ("resnet50", 32): 1668.19,
    ("resnet50", 64): 1497.96,
    ("resnet101", 16): 3271.72,
    ("resnet101", 32): 2280.38,
    ("resnet101", 64): 2410.24,
    ("resnet152", 16): 4067.69,
    ("resnet152", 32): 2758.42,
    ("resnet152", 64): 2212.24,
}
"""Pauloski et al. 2020, Table V: the slowest worker's eigendecompositions."""

SLOWEST_SPEEDUP: dict[Row, float] = {
    ("resnet50", 32): 1.34,
    ("resnet50", 64): 1.55,
    ("resnet101", 32): 1.41,
    ("resnet101", 64): 1.26,
    ("resnet152", 32): 1.51,
    ("resnet152", 64): 1.85,
}
"""Table VI, min: over 16 GPUs, of the slowest worker."""

FASTEST_SPEEDUP: dict[Row, float] = {
    ("resnet50", 32): 2.88,
    ("resnet50", 64): 6.61,
    ("resnet101", 32): 3.33,
    ("resnet101", 64): 6.18,
    ("resnet152", 32): 2.03,
    ("resnet152", 64): 8.27,
}
"""Table VI, max: of the fastest worker."""

IMPROVEMENT: dict[Row, float] = {
    (model, world): percent / 100
    for model, row in {
        "resnet50": (20.9, 19.7, 25.2, 23.5, 17.7),
        "resnet101": (18.4, 11.1, 15.1, 19.5, 9.7),
        "resnet152": (8.2, 7.6, 6.0, 4.9, -11.1),
    }.items()
    for world, percent in zip((16, 32, 64, 128, 256), row, strict=True)
}
"""Table IV, the tops of Figures 7 to 9: time to train saved by K-FAC-opt over SGD."""

EFFICIENCY = {"sgd": 0.686, "layer_wise": 0.624, "factor_wise": 0.718}
"""Section VI-C3: scaling efficiency of ResNet-50 from 16 to 128 GPUs."""

FITTED_ROWS: tuple[Row, ...] = (
    ("resnet50", 16),
    ("resnet101", 32),
    ("resnet152", 64),
)
"""The diagonal of Table V: each model once, and each number of GPUs."""

CONTRADICTORY: Row = ("resnet101", 64)
"""Took longer than on 32 GPUs, where its slowest worker had these factors and more."""

STEP_SECONDS = {128: 0.178, 256: 0.186, 512: 0.149, 1024: 0.187}
"""Osawa et al. 2020, Table 1: SP-NGD with all techniques, by GPUs."""

REDUCTION = {128: 0.236, 256: 0.151, 512: 0.054, 1024: 0.078}
"""Table 2: share of the statistics that is refreshed."""

STALE_SPEEDUP = {128: 1.33, 256: 1.32, 512: 1.68, 1024: 1.40}
"""Table 2: emp+unitBN over emp+unitBN+stale."""


def worker_sizes(model: str, world: int) -> list[list[int]]:
    """Sizes of the factors each worker decomposes, as in Pauloski et al. 2020."""
    plan = make_plan(
        work_of(model).specs,
        world=world,
        strategy="factor_wise",
        placement="round_robin",
    )
    return sizes_by_rank(plan)


def sizes_by_rank(plan: Plan) -> list[list[int]]:
    """Sizes of the factors each rank owns."""
    sizes: list[list[int]] = [[] for _ in range(plan.world)]
    for spec in plan.statistics:
        sizes[plan.owners[spec.name]].append(spec.size)
    return sizes


def worker_seconds(curve: Curve, workers: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of every worker."""
    return [sum(map(curve, sizes)) for sizes in workers]


def fit_eigen(rows: Sequence[Row], workers: dict[Row, list[list[int]]]) -> Curve:
    """Least squares of relative errors for call + square n^2, neither negative.

    Which worker is slowest depends on the curve, so both are found in turn.
    """
    curve = Curve(call=0.05, square=8e-8)
    for _ in range(20):
        table: list[list[float]] = []
        for row in rows:
            curve_now = curve
            sizes = max(workers[row], key=lambda s: sum(map(curve_now, s)))
            seconds = EIGEN_MS[row] / 1e3
            columns = (len(sizes), 1e-6 * sum(n * n for n in sizes))
            table.append([column / seconds for column in columns])
        matrix = np.array(table)
        found = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)[0]
        if found.min() < 0:
            found = _one(matrix)
        new = Curve(call=float(found[0]), square=1e-6 * float(found[1]))
        if new == curve:
            break
        curve = new
    return curve


def _one(matrix: np.ndarray) -> np.ndarray:
    """The better of the two fits with one term only."""
    fits: list[tuple[float, np.ndarray]] = []
    for index in range(2):
        column = matrix[:, index]
        value = np.zeros(2)
        value[index] = column.sum() / (column @ column)
        fits.append((float(((matrix @ value - 1) ** 2).sum()), value))
    return min(fits, key=lambda fit: fit[0])[1]
