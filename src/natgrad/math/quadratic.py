"""The quadratic model of the loss in few directions (Martens and Grosse 2015, 6, 7).

Around the present weights the objective is taken to change by
``M(d) = slope . d + d . C d / 2``. Along k directions, ``d = x_1 d_1 + .. + x_k d_k``,
all of it is k slopes and the k x k products ``d_i . C d_j``. Numbers, not tensors: they
are the same on all ranks.
"""

import math
from collections.abc import Sequence

Numbers = Sequence[float]
Products = Sequence[Numbers]
WORSE = 4
"""How many times damping is raised at once where the objective grew."""
FASTEST = 4
"""Damping falls by at most this many factors at once."""
DRIFT = 0.1
"""Rates that change by no more, the first relative to itself, hold for longer."""
DOUBTED = 0.5
"""A trust below this keeps damping from falling."""
RAREST = 8
"""Steps between two solutions, at most."""
LONGEST = 1.0
"""Of the last step at most this much is taken again, or taken back."""
LEARNT = 0.1
"""How fast trust follows, in its logarithm."""
LEAST = 1e-3
"""Trust is at least this."""
POOR = 0.25
"""A reduction ratio below this raises damping."""
STRAIGHT = 0.25
"""Relative: how far a growth may be from its slope times the step, to be linear."""
UNUSUAL = 4.0
"""Times the usual predicted fall, from which on a step is compared at once."""
NEWEST = 0.1
"""Weight of the newest predicted fall in the usual one."""
PARALLEL = 1e-10
"""Two directions whose cosine in the metric C is this close to 1 are one."""


def change(slopes: Numbers, products: Products, x: Numbers) -> float:
    """``M(d)`` of the step with coefficients x; negative if the objective falls."""
    linear = math.fsum(s * a for s, a in zip(slopes, x, strict=True))
    rows = zip(products, x, strict=True)
    curved = math.fsum(
        a * p * b for row, a in rows for p, b in zip(row, x, strict=True)
    )
    return linear + curved / 2


def minimiser(
    slopes: Numbers, products: Products, fixed: Sequence[float | None]
) -> tuple[float, float]:
    """The coefficients of two directions with the least ``M(d)``.

    ``fixed`` has those that are given; None is to be found. A direction along which
    there is no curvature, or that the first one contains, gets 0; so does the second
    if the first would be gone against. One that is found for the second is in [-1, 1]:
    few examples may see no curvature along a step that others made.
    """
    x, y = _unbounded(slopes, products, fixed)
    if fixed[1] is not None or abs(y) <= LONGEST:
        return x, y
    y = math.copysign(LONGEST, y)
    x, _ = _unbounded(slopes, products, (fixed[0], y))
    return (x, y) if x > 0 else _unbounded(slopes, products, (fixed[0], 0.0))


def _unbounded(
    slopes: Numbers, products: Products, fixed: Sequence[float | None]
) -> tuple[float, float]:
    (s, t), ((p, r), (_, q)) = slopes, products
    a, b = fixed
    if a is not None and b is not None:
        return a, b
    if a is not None:
        return a, _ratio(-(t + r * a), q)
    if b is not None:
        return _ratio(-(s + r * b), p), b
    determinant = p * q - r * r
    if not (p > 0 and q > 0 and determinant > PARALLEL * p * q):
        return _ratio(-s, p), 0.0
    x, y = (r * t - q * s) / determinant, (r * s - p * t) / determinant
    return (x, y) if x > 0 else (_ratio(-s, p), 0.0)


def _ratio(x: float, y: float) -> float:
    return x / y if y > 0 and math.isfinite(x / y) else 0.0


def trusted(trust: float, slope: float, curvature: float) -> float:
    """The part of the learning rate that another batch would have chosen, followed.

    ``slope`` and ``curvature`` are those along the last step, at its end and on a batch
    that did not choose it. It was ``slope / curvature`` of its own length too long:
    0 if it ended where it should for this batch too.
    """
    if not curvature > 0:
        return trust
    beyond = min(max(slope / curvature, -1.0), 1.0)
    return min(max(trust * math.exp(-LEARNT * beyond), LEAST), 1.0)


def reduction_ratio(
    before: float, after: float, predicted: float, least: float = 0.0
) -> float:
    """True over predicted change of the objective.

    -inf if it is not finite any more, or grew by a step of which the model knew that it
    was too long. NaN if nothing can be said: changes are at most ``least``, which is
    rounding.
    """
    if not math.isfinite(after):
        return -math.inf
    if max(abs(predicted), abs(after - before)) <= least:
        return math.nan
    if predicted >= 0:
        return -math.inf if after > before else math.nan
    return (after - before) / predicted


def expected_fall(predicted: float, ratio: float) -> float:
    """What a step is expected to gain, as models are as good as the last ratio."""
    part = min(max(ratio, 0.0), 1.0) if math.isfinite(ratio) else 1.0
    return part * abs(predicted)


def followed_fall(usual: float, predicted: float) -> tuple[float, bool]:
    """The running average of predicted falls, and whether this one is unusual.

    A few hard examples after many easy ones promise much, with a curvature that was
    estimated where there was none left.
    """
    return usual + NEWEST * (predicted - usual), predicted > UNUSUAL * usual


def is_straight(growth: float, slope: float) -> bool:
    """Whether an objective that grew along a step did so in proportion to its length.

    ``slope`` is that along the step, at its end. If so the step was as bad at its
    beginning: the gradients of two batches point apart, whatever the curvature.
    """
    return abs(slope - growth) <= STRAIGHT * growth


def adapted(
    damping: float, ratio: float, factor: float, streak: int = 0, trust: float = 1.0
) -> tuple[float, int]:
    """Levenberg-Marquardt: less damping above 3/4, more below 1/4 (their 6.5).

    Much more below 0: the objective grew. The other number is how often in a row it
    has fallen, ``streak`` before this: each time by one more ``factor``, up to four. A
    first damping that is far too large is left behind in few steps. After a rise it
    falls four times by one factor before that. It does not fall where ``trust`` says
    that steps are much too long for other batches already.
    """
    if ratio > 0.75 and trust >= DOUBTED:
        streak = min(streak + 1, FASTEST)
        return damping * factor ** max(streak, 1), streak
    if ratio < POOR:
        return damping / factor ** (WORSE if ratio < 0 else 1), -FASTEST
    return damping, min(streak, 0)


def followed(old: Numbers, new: Numbers, trust: float) -> tuple[float, float]:
    """Learning rate and momentum that follow what one batch finds.

    By ``trust``, the part of a batch's step that is good for others: all of it while
    that is 1. The learning rate, a scale, follows in its logarithm, and is never
    above what this batch finds.
    """
    (a, b), (x, y) = old, new
    if 0 < a < x:
        x = a ** (1 - trust) * x**trust
    return x, b + trust * (y - b)


def paced(interval: int, old: Numbers, new: Numbers, ratio: float) -> int:
    """Steps until learning rate and momentum are to be found again.

    Twice as many as before, up to eight, if they have hardly changed since the last
    time and the last reduction ratio says that the model is nearly exact.
    """
    (a, b), (x, y) = old, new
    still = abs(x - a) <= DRIFT * abs(a) and abs(y - b) <= DRIFT
    return min(2 * interval, RAREST) if still and abs(ratio - 1) <= DRIFT else 1
