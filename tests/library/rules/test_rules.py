"""Update rules against dense linear algebra and loops by hand, in float64."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.library.engine.test_preconditioning import (
    factors_of,
    layer_gradient,
    near,
    preconditioned,
    weights_of,
)
from tests.support import oracle
from tests.support.construct import construct
from tests.support.layer_table import KRONECKER, build, draw
from tests.support.toys import backward, mlp
from torch import Tensor, nn

from natgrad import (
    EKFAC,
    KFAC,
    SPNGD,
    Adam,
    AverageGradients,
    AverageUpdates,
    EigenAdam,
    Every,
    Free,
    KLClip,
    Kronecker,
    LayerTrust,
    Options,
    Orthogonal,
    Polar,
    Rule,
)
from natgrad.layers.matrices import Conv
from natgrad.layers.options import LayerOptions
from natgrad.math import rules
from natgrad.math.inverse import damped_roots, track
from natgrad.math.polar import polar, quintics
from natgrad.math.precondition import apply_eigen
from natgrad.math.rules import moved_moment, trust_ratio

LAYERS = ("linear", "linear-3d", "conv2d", "conv2d-groups", "embedding")
DAMPING = 0.3
FINE = Every(1, 1)


def svd_polar(x: Tensor) -> Tensor:
    """U V^T; directions whose singular value is zero up to rounding are left out."""
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    kept = values > 1e-9 * values[..., :1]
    return (left * kept.unsqueeze(-2)) @ right


def root(x: Tensor, power: float) -> Tensor:
    """A symmetric positive definite stack to a power, by its eigenvalues."""
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values.pow(power).unsqueeze(1)) @ vectors.mT


def damped(x: Tensor, damping: float, *, relative: bool) -> Tensor:
    """``X + damping I`` of a dense stack; relative to the mean eigenvalue if asked."""
    size = x.shape[-1]
    mean = x.diagonal(dim1=1, dim2=2).mean() if relative else 1.0
    return x + damping * mean * torch.eye(size, dtype=x.dtype)


def factors(kfac: KFAC, sides: str) -> list[Tensor | None]:
    """Dense A and G as the optimizer has them; None where it has none."""
    states = kfac.engine.statistics.states
    names = ("layer/A", "layer/G")
    found = [kfac.statistic(n) if n in states else None for n in names]
    assert [x is not None for x in found] == {
        "both": [True, True],
        "inputs": [True, False],
        "outputs": [False, True],
    }[sides]
    return [None if x is None else oracle.as_dense(x) for x in found]


# -- the polar factor ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 5, 9), (3, 9, 5), (2, 7, 7), (1, 1, 4)])
def test_the_polar_factor_is_that_of_the_svd(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64) * 1e3
    torch.testing.assert_close(polar(x, steps=12), svd_polar(x), rtol=0, atol=1e-9)


def test_six_steps_bring_singular_values_of_three_decades_to_one() -> None:
    torch.manual_seed(0)
    left, right = (svd_polar(torch.randn(1, 40, n)) for n in (40, 60))
    spectrum = torch.logspace(0, -3, 40)
    x = (left * spectrum) @ right
    # the bound of the largest one is not tight: the least may lie a little lower
    values = torch.linalg.svdvals(polar(x))
    assert ((values - 1).abs() < 0.15).all()
    assert ((values - 1).abs()[0, :-4] < 0.01).all()


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e12, 1e30])
def test_the_polar_factor_does_not_depend_on_scale(size: float) -> None:
    """Squares of squares of such entries are zero or infinite in float32."""
    x = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(polar(size * x), polar(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rank", "least"), [(1, 0.8), (8, 0.9), (48, 0.98)])
def test_in_half_precision_rounding_does_not_become_a_direction(
    rank: int, least: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    sides = (torch.randn(1, 64, rank, generator=generator) for _ in range(2))
    x = next(sides) @ next(sides).mT
    u, _, v = torch.linalg.svd(x)
    exact = u[..., :rank] @ v[..., :rank, :]
    found = polar(x, dtype=torch.bfloat16)
    assert found.dtype == x.dtype
    cosine = (exact * found).sum() / (exact.norm() * found.norm())
    assert float(cosine) > least


def test_a_gradient_whose_square_is_lost_makes_no_large_update() -> None:
    g = torch.full((1, 2, 3), 1e-25)
    assert rules.adaptive_scale(g, g.square(), 1e-3).abs().max() < 1


def test_each_quintic_alternates_between_its_largest_errors() -> None:
    low, high = 1e-3, 1.01
    grid = torch.linspace(low, high, 200001, dtype=torch.float64)
    a, b, c = quintics(low, 1)[0]
    error = a * grid + b * grid**3 + c * grid**5 - 1
    largest = error.abs().max()
    signs = [float(error[i].sign()) for i in _peaks(error, largest)]
    assert signs == [-1.0, 1.0, -1.0, 1.0]


def _peaks(error: Tensor, largest: Tensor) -> list[int]:
    near_peak = (error.abs() > 0.999 * largest).nonzero().flatten().tolist()
    runs = itertools.groupby(near_peak, key=lambda i: float(error[i].sign()))
    return [next(iter(run)) for _, run in runs]


def test_each_of_a_stack_has_its_own_polar_factor_and_zeros_stay_zero() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, 4, dtype=torch.float64)
    x[1] = 0.0
    y = polar(x)
    assert not y[1].any()
    for i in (0, 2):
        torch.testing.assert_close(y[i : i + 1], polar(x[i : i + 1]))


def test_a_root_squared_is_the_damped_inverse() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 9, dtype=torch.float64)
    matrix, diagonal = x @ x.mT, torch.rand(1, 4, dtype=torch.float64)
    w, d = damped_roots([matrix, diagonal], [0.1, 0.2])
    assert isinstance(w, Tensor)
    assert isinstance(d, Tensor)
    near(w @ w.mT, damped(matrix, 0.1, relative=False).inverse())
    assert not w.tril(-1).any()
    near(d.square(), (diagonal + 0.2).reciprocal())


# -- statistics, scale and whitening ---------------------------------------------------


@pytest.mark.parametrize("style", ["eigen", "factored", "relative"])
@pytest.mark.parametrize("sides", ["inputs", "outputs"])
@pytest.mark.parametrize("name", LAYERS)
def test_one_factor_takes_the_whole_damping(name: str, sides: Any, style: Any) -> None:
    model, kfac, plain = preconditioned(
        KRONECKER[name], rule=Kronecker(sides=sides, style=style), damping=DAMPING
    )
    a, g = factors(kfac, sides)
    relative = style == "relative"
    want = (
        plain if a is None else plain @ damped(a, DAMPING, relative=relative).inverse()
    )
    want = want if g is None else damped(g, DAMPING, relative=relative).inverse() @ want
    near(layer_gradient(model.layer), want)


def test_a_tracked_basis_preconditions_by_hand() -> None:
    model, other = mlp(), mlp()
    options: dict[str, Any] = {
        "factor_decay": 0.0,
        "length": Free(),
        "damping": DAMPING,
    }
    kfac = construct(
        KFAC, model, refresh=FINE, rule=Kronecker(basis="tracked"), **options
    )
    exact = construct(KFAC, other, refresh=FINE, **options)
    plain, seen = torch.empty(0), []
    for step in range(2):
        backward(model, step)
        plain = layer_gradient(model[0])
        kfac.step()
        backward(other, step)
        exact.step()
        states = exact.engine.statistics.states
        seen.append([states[f"0/{x}"].inverse or () for x in "AG"])
    dense = [(q * v.unsqueeze(1)) @ q.mT for q, v in seen[1]]
    right, left = (track(x, old) for x, old in zip(dense, seen[0], strict=True))
    near(layer_gradient(model[0]), apply_eigen(plain, right, left, DAMPING))
    gap = layer_gradient(model[0]) - layer_gradient(other[0])
    assert gap.norm() > 1e-3 * plain.norm()


@pytest.mark.parametrize("name", LAYERS)
def test_relative_damping_of_both_factors(name: str) -> None:
    row = KRONECKER[name]
    rule = Kronecker(style="relative")
    model, kfac, plain = preconditioned(row, rule=rule, damping=DAMPING)
    found = [x for x in factors(kfac, "both") if x is not None]
    a, g = (damped(x, DAMPING, relative=True) for x in found)
    near(layer_gradient(model.layer), g.inverse() @ plain @ a.inverse())


@pytest.mark.parametrize("whitening", ["half", "full"])
@pytest.mark.parametrize("sides", ["both", "inputs", "outputs"])
@pytest.mark.parametrize("name", LAYERS)
def test_orthogonal_is_the_polar_factor_between_roots(
    name: str, sides: Any, whitening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("natgrad.rules.orthogonal.polar", lambda x: polar(x, 12))
    rule = Orthogonal(sides=sides, whitening=whitening)
    model, kfac, plain = preconditioned(KRONECKER[name], damping=DAMPING, rule=rule)
    eye = (torch.eye(n, dtype=torch.float64) for n in (plain.shape[2], plain.shape[1]))
    a, g = (
        i if x is None else damped(x, DAMPING, relative=True)
        for x, i in zip(factors(kfac, sides), eye, strict=True)
    )
    if whitening == "full":
        want = svd_polar(g.inverse() @ plain @ a.inverse())
    else:
        half = svd_polar(root(g, -0.5) @ plain @ root(a, -0.5))
        want = root(g, -0.5) @ half @ root(a, -0.5)
    oracle.near(layer_gradient(model.layer), want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("sides", ["both", "inputs", "outputs"])
@pytest.mark.parametrize("name", LAYERS)
def test_adaptive_is_adam_in_the_eigenbasis(name: str, sides: Any) -> None:
    """Three steps in the basis of the first."""
    row, beta2, damping = KRONECKER[name], 0.7, 0.01
    model, _, _ = build(row)
    rule = EigenAdam(sides=sides, beta2=beta2)
    options: dict[str, Any] = {"rule": rule, "length": Free(), "damping": damping}
    options["refresh"] = Every(100, 100)
    square = torch.zeros(())
    with construct(KFAC, model, **options, **row.options) as kfac:
        for step in range(3):
            x, y = draw(row)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            plain = layer_gradient(model.layer)
            kfac.step()
            q_a, q_g = (
                torch.eye(n, dtype=torch.float64)
                if f is None
                else torch.linalg.eigh(f)[1]
                for f, n in zip(factors(kfac, sides), plain.shape[:0:-1], strict=True)
            )
            if name == "embedding" and sides != "outputs":
                q_a = torch.eye(plain.shape[2], dtype=torch.float64)
            rotated = q_g.mT @ plain @ q_a
            square = beta2 * square + (1 - beta2) * rotated**2
            unbiased = square / (1 - beta2 ** (step + 1))
            rms = unbiased.mean((1, 2), keepdim=True).sqrt()
            scaled = rotated / (unbiased.sqrt() + damping * rms).clamp_min(1e-300)
            near(layer_gradient(model.layer), q_g @ scaled @ q_a.mT)


CORRECTED = [n for n, row in KRONECKER.items() if row.options.get("sharing") is None]


def corrected_fisher(
    model: Any, x: Tensor, y: Tensor, bases: tuple[Tensor, Tensor]
) -> Tensor:
    """The diagonal of the exact Fisher in a basis, an example at a time."""
    squares = [
        rules.into_basis(e.gradient, *bases).square()
        for e in oracle.examples(model, "layer", x, y)
    ]
    return torch.stack(squares).mean(0)


@pytest.mark.parametrize("style", ["eigen", "relative"])
@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_has_the_exact_diagonal_of_the_fisher(name: str, style: Any) -> None:
    """The first step has K-FAC's scale, the second that of its own examples."""
    row = KRONECKER[name]
    model, x, y = build(row)
    options: dict[str, Any] = {"rule": EKFAC(style=style)}
    options |= {"refresh": Every(1, 100), "damping": DAMPING, "factor_decay": 0.5}
    with construct(KFAC, model, length=Free(), **options, **row.options) as kfac:
        for step in range(2):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            plain = layer_gradient(model.layer)
            kfac.step()
            bases = kfac.engine.preconditioner.bases()["layer"]
            if step == 0:
                a, g = (oracle.as_dense(f) for f in factors_of(kfac))
                dense = oracle.kronecker(g, a)
                mean = dense.diagonal(dim1=1, dim2=2).mean()
                damping = DAMPING * (mean if style == "relative" else 1.0)
                want = oracle.solve(dense, plain, float(damping))
            else:
                fisher = corrected_fisher(model, x, y, bases)
                near(kfac.statistic("layer/S").reshape(fisher.shape), fisher)
                damping = DAMPING * (fisher.mean() if style == "relative" else 1.0)
                scaled = rules.into_basis(plain, *bases) / (fisher + damping)
                want = rules.out_of_basis(scaled, *bases)
            near(layer_gradient(model.layer), want)


@pytest.mark.parametrize("groups", [1, 2])
def test_corrected_counts_positions_of_a_convolution_as_tokens(groups: int) -> None:
    """Each position's gradient is squared by itself, a position at a time here."""
    torch.manual_seed(0)
    module = nn.Conv1d(4, 6, 3, padding=1, groups=groups).double()
    x, g = (torch.randn(2, c, 5, dtype=torch.float64) for c in (4, 6))
    n, m = 12 // groups + 1, 6 // groups
    right, left = (
        torch.linalg.qr(torch.randn(groups, k, k, dtype=torch.float64))[0]
        for k in (n, m)
    )
    patches = F.unfold(x[:, :, None], (1, 3), padding=(0, 1))
    want = torch.zeros(groups, m, n, dtype=torch.float64)
    for e, t, s in itertools.product(range(2), range(5), range(groups)):
        row = patches[e, s * (n - 1) : (s + 1) * (n - 1), t]
        row = torch.cat((row, row.new_ones(1)))
        v = torch.outer(g[e, s * m : (s + 1) * m, t], row)
        want[s] += (left[s].T @ v @ right[s]).square()
    kind = Conv(LayerOptions(loss="tokens"))
    near(kind.scale_moment(module, x, g, right, left).reshape(want.shape), want)


def test_corrected_counts_tokens_as_examples() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    kfac = KFAC(model, rule=EKFAC(), loss="tokens", length=Free(), refresh=FINE)
    bases: Any = None
    for _ in range(2):
        model.zero_grad()
        bases = kfac.engine.capture.armed.bases.get("model")
        x = torch.randn(4, 5, 3, dtype=torch.float64)
        out = model(x)
        out.retain_grad()
        out.square().mean((0, 1)).sum().backward()
        kfac.step()
    assert bases is not None
    assert out.grad is not None  # pyright: ignore
    ones = torch.ones(20, 1, dtype=torch.float64)
    inputs = torch.cat((x.reshape(20, 3), ones), 1)  # pyright: ignore
    each = 20 * out.grad.reshape(20, 2)  # pyright: ignore
    gradients = torch.einsum("em,en->emn", each, inputs)
    squares = rules.into_basis(gradients, *bases).square().mean(0)
    state = kfac.engine.statistics.states["model/S"]
    new = kfac.engine.preconditioner.bases()["model"]
    moved = moved_moment(squares[None], (bases[0], new[0]), (bases[1], new[1]))
    assert state.inverse is not None
    near(state.inverse[0].reshape(1, 2, 4), moved)


def test_a_moved_second_moment_is_the_diagonal_in_the_new_basis() -> None:
    torch.manual_seed(0)
    s, m, n = 2, 3, 4
    square = torch.rand(s, m, n, dtype=torch.float64)
    bases = [
        torch.linalg.qr(torch.randn(s, k, k, dtype=torch.float64))[0]
        for k in (n, n, m, m)
    ]
    right, left = (bases[0], bases[1]), (bases[2], bases[3])
    moved = moved_moment(square, right, left)
    for i in range(s):
        old = torch.kron(left[0][i], right[0][i])
        new = torch.kron(left[1][i], right[1][i])
        dense = old @ square[i].flatten().diag() @ old.T
        near(moved[i].flatten(), (new.T @ dense @ new).diagonal())
    near(moved.sum((1, 2)), square.sum((1, 2)))


def test_a_refresh_moves_the_second_moments() -> None:
    model = mlp()
    options: dict[str, Any] = {
        "rule": EigenAdam(),
        "length": Free(),
        "factor_decay": 0.5,
    }
    with construct(KFAC, model, refresh=Every(2, 2), **options) as kfac:
        bases, moments = kfac.engine.preconditioner.bases, kfac.engine.moments.states
        for step in range(3):
            old = {k: (v.square.clone(), bases()[k]) for k, v in moments.items()}
            backward(model, step)
            gradient = kfac.engine.block["0"].gradient()
            assert gradient is not None
            kfac.step()
        before, (right, left) = old["0"]  # pyright: ignore
        new_right, new_left = bases()["0"]
        assert not torch.equal(right, new_right)
        moved = moved_moment(before, (right, new_right), (left, new_left))
        rotated = new_left.mT @ gradient @ new_right  # pyright: ignore
        near(moments["0"].square, 0.95 * moved + 0.05 * rotated**2)


# -- trust, momentum and the rest ------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [Kronecker(style="relative"), EigenAdam(), Orthogonal()]
)
def test_layer_trust_gives_an_update_the_norm_of_its_weight(rule: Rule) -> None:
    row = KRONECKER["conv2d"]
    model, _, _ = preconditioned(row, length=LayerTrust(), rule=rule)
    other, _, _ = preconditioned(row, length=Free(), rule=rule)
    update, weight = layer_gradient(model.layer), weights_of(model.layer)
    near(update.norm(), weight.norm())
    unscaled = layer_gradient(other.layer)
    near(update / update.norm(), unscaled / unscaled.norm())


def test_the_trust_ratio_of_nothing() -> None:
    zero, one = torch.zeros(()), torch.ones(())
    assert trust_ratio(one, zero, 4) == 0
    # a weight of zero moves as if each of its 4 rows had norm 0.1
    torch.testing.assert_close(trust_ratio(zero, one, 4), torch.tensor(0.2))


def test_layer_trust_leaves_norms_and_plain_parameters_alone() -> None:
    models = mlp(), mlp()
    for model, length in zip(models, (Free(), LayerTrust()), strict=True):
        kfac = KFAC(model, length=length, norm="unit", refresh=FINE)
        backward(model, 0)
        kfac.step()
    (plain, trusted) = models
    near(trusted[1].weight.grad, plain[1].weight.grad)  # type: ignore[union-attr]
    assert not torch.allclose(trusted[0].weight.grad, plain[0].weight.grad)  # type: ignore


def test_spngd_clips_by_kl_as_kfac_does() -> None:
    clipped, preconditioned_ = mlp(), mlp()
    options: dict[str, Any] = {"length": KLClip(kappa=1e-5), "rule": Kronecker()}
    options |= {"refresh": FINE, "norm": "unit"}
    spngd = construct(SPNGD, clipped, lr=0.1, momentum=0.0, **options)
    sgd = torch.optim.SGD(preconditioned_.parameters(), lr=0.1)
    construct(KFAC, preconditioned_, sgd, factor_decay=0.0, **options)
    for step in range(3):
        for model, optimizer in ((clipped, spngd), (preconditioned_, sgd)):
            backward(model, step)
            optimizer.step()
    for p, q in zip(clipped.parameters(), preconditioned_.parameters(), strict=True):
        near(p.detach(), q.detach())


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_updates_is_that_of_sgd(nesterov: bool) -> None:
    ours, theirs = mlp(), mlp()
    options: dict[str, Any] = {"refresh": FINE, "rule": Kronecker(), "norm": "unit"}
    spngd = construct(
        SPNGD,
        ours,
        lr=0.1,
        momentum=0.9,
        average=AverageUpdates(nesterov=nesterov),
        **options,
    )
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
    construct(KFAC, theirs, sgd, factor_decay=0.0, length=Free(), **options)
    for step in range(4):
        for model, optimizer in ((ours, spngd), (theirs, sgd)):
            backward(model, step)
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        near(p.detach(), q.detach())


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_average_of_gradients_is_scaled(nesterov: bool) -> None:
    """A loop by hand: the average without bias, times the damped inverse of A."""
    model, momentum, lr = mlp(), 0.8, 0.1
    options: dict[str, Any] = {"rule": Kronecker(sides="inputs", style="relative")}
    options |= {"average": AverageGradients(nesterov=nesterov), "norm": "skip"}
    spngd = construct(
        SPNGD,
        model,
        lr=lr,
        momentum=momentum,
        refresh=FINE,
        factor_decay=0.5,
        **options,
    )
    layer = model[3]
    seen: list[Tensor] = []
    for step in range(4):
        backward(model, step)
        seen.append(layer_gradient(layer))
        before = weights_of(layer)
        spngd.step()
        seen_twice = [*seen, seen[-1]] if nesterov else seen
        count = len(seen_twice)
        weights = [momentum ** (count - 1 - i) for i in range(count)]
        if nesterov:  # the newest gradient counts as it will in the next step, and now
            weights = [momentum ** (count - 1 - i) for i in range(count - 1)] + [1.0]
        pairs = zip(weights, seen_twice, strict=True)
        total = torch.stack([w * g for w, g in pairs]).sum(0)
        average = total / sum(momentum**i for i in range(count))
        a = oracle.as_dense(spngd.statistic("3/A"))
        want = before - lr * average @ damped(a, 1e-3, relative=True).inverse()
        near(weights_of(layer), want)


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_the_rest_may_follow_adam(rate: float) -> None:
    """Without momentum it is g / (sqrt(v) + 1e-3 rms) of the running square."""
    model, lr, beta2 = mlp(), 0.1, 0.8
    options: dict[str, Any] = {"fallback": Adam(rate=rate, beta2=beta2), "norm": "skip"}
    spngd = construct(SPNGD, model, lr=lr, momentum=0.0, refresh=FINE, **options)
    gamma, square = model[1].weight, torch.zeros(())
    for step in range(3):
        backward(model, step)
        assert isinstance(gamma.grad, Tensor)
        g, before = gamma.grad.clone(), gamma.detach().clone()  # type: ignore
        spngd.step()
        square = beta2 * square + (1 - beta2) * g**2
        unbiased = square / (1 - beta2 ** (step + 1))
        scale = unbiased.sqrt() + 1e-3 * unbiased.mean().sqrt()
        near(gamma.detach(), before - rate * lr * g / scale)  # type: ignore[operator]


def test_the_rest_of_kfac_may_be_scaled_too() -> None:
    model = mlp()
    kfac = construct(KFAC, model, fallback=Adam(), length=Free())
    backward(model, 0)
    gradient = model[1].weight.grad.clone()  # type: ignore[union-attr]
    kfac.step()
    scale = gradient.abs() + 1e-3 * gradient.square().mean().sqrt()
    near(model[1].weight.grad, gradient / scale)  # type: ignore[union-attr]


@pytest.mark.parametrize("nesterov", [False, True])
def test_an_average_of_gradients_has_no_bias_whenever_it_begins(nesterov: bool) -> None:
    """Weights add up to 1 for a late parameter too, and when momentum changes."""
    model = nn.Linear(1, 1).double()
    used, late = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    model.register_parameter("used", used)
    model.register_parameter("late", late)
    options: dict[str, Any] = {"average": AverageGradients(nesterov=nesterov)}
    optimizer = construct(SPNGD, model, lr=1.0, momentum=0.95, **options)
    for step in range(8):
        optimizer.zero_grad()
        optimizer.param_groups[0]["momentum"] = 0.95 - 0.1 * step
        before = [used.item(), late.item()]
        loss = model(torch.ones(1, 1, dtype=torch.float64)).square().mean()
        (loss + used + (late if step > 4 else 0)).sum().backward()
        optimizer.step()
        assert used.item() - before[0] == pytest.approx(-1.0)
        assert late.item() - before[1] == pytest.approx(-1.0 if step > 4 else 0.0)


# -- Polar -----------------------------------------------------------------------------


def one(model: nn.Module) -> list[dict[str, Any]]:
    """A group of all parameters, so that no norm is fixed."""
    return [{"params": model.named_parameters()}]


def test_polar_changes_every_layer_by_a_part_of_what_it_was_at_the_start() -> None:
    model = mlp()
    optimizer = Polar(model, one(model), lr=0.02, refresh=FINE, weight_decay=0.0)
    start = weights_of(model[0]).norm()
    for step in range(3):
        before = weights_of(model[0])
        backward(model, step)
        optimizer.step()
        change = weights_of(model[0]) - before
        near(change.norm(), 0.02 * start)


def test_polar_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "natgrad.rules.orthogonal.polar", lambda x, *_, **__: polar(x, 12)
    )
    model, lr, decay = mlp(), 0.05, 0.1
    rates: Any = {"lr": lr, "momentum": 0.0, "weight_decay": decay}
    rule = Orthogonal(sides="inputs", whitening="full", beta2=0.95)
    assert Polar.defaults.rule == rule
    optimizer = Polar(model, one(model), damping=0.5, **rates)
    layer = model[0]
    before = weights_of(layer)
    backward(model, 0)
    gradient = layer_gradient(layer)
    optimizer.step()
    a = damped(oracle.as_dense(optimizer.statistic("0/A")), 0.5, relative=True)
    p = svd_polar(gradient @ root(a, -1.0))
    u = p / p.norm(dim=2, keepdim=True)  # the first second moment is of this step
    kept = before.clone()
    kept[..., :-1] *= 1 - lr * decay  # the bias is the last column
    oracle.near(weights_of(layer), kept - lr * before.norm() * u / u.norm(), rtol=1e-7)


def test_polar_follows_a_scheduler_and_lowers_the_loss() -> None:
    model = mlp()
    optimizer = Polar(model, lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    losses = []
    for step in range(30):
        losses.append(backward(model, step).item())
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] < 1e-6
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_inputs_only_plans_sends_and_captures_no_g() -> None:
    model = mlp()
    optimizer = Polar(model, lr=0.1)
    assert sorted(optimizer.engine.statistics.states) == ["0/A", "3/A"]
    assert [s.name for s in optimizer.engine.plan.statistics] == ["0/A", "3/A"]
    backward(model, 0)
    assert sorted(optimizer.engine.capture.current.sums) == ["0/A", "3/A"]


# -- what does not go together ---------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Orthogonal(style="eigen"), "'relative' or 'factored'"),
        (lambda: EKFAC(style="factored"), "'eigen' or 'relative'"),
        (lambda: Kronecker(basis="tracked", style="factored"), "no eigenbases"),
        (lambda: EigenAdam(beta2=1.0), "beta2=1.0"),
        (lambda: Adam(rate=0.0), "rate=0.0"),
        (lambda: Kronecker(sides="none"), "sides='none'"),
        (lambda: Options(rule=EigenAdam(), length=KLClip()), r"LayerTrust\(\) or Free"),
        (lambda: Options(fallback=EKFAC()), r"Plain\(\) or Adam\(\)"),
    ],
)
def test_choices_that_do_not_go_together(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_state_of_another_rule_is_refused() -> None:
    saved = SPNGD(mlp(), lr=0.1, rule=Kronecker(style="relative")).state_dict()
    other = SPNGD(mlp(), lr=0.1, rule=Orthogonal())
    both = r"(?s)saved:.*'kronecker'.*here:.*'orthogonal'.*Must be"
    with pytest.raises(ValueError, match=both):
        other.load_state_dict(saved)


def test_one_optimizer_trains_a_network_of_every_kind() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 4),
        nn.Flatten(),
        nn.Linear(12, 2),
    )
    x = torch.randint(0, 7, (64, 3))
    y = (x.sum(1) > 9).long()
    optimizer = Polar(model, one(model), lr=0.05)
    first = last = 0.0
    for step in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        first, last = (loss.item() if step == 0 else first), loss.item()
    assert last < 0.3 * first
