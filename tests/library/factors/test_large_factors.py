"""Factors above the largest size: cut into parts, by every rule, on all ranks."""

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.library.engine.test_preconditioning import layer_gradient, near
from tests.support import oracle
from tests.support.construct import construct
from tests.support.layer_table import KRONECKER, NORM, build, draw
from tests.support.replicas import Case, train
from tests.support.world import run_world
from torch import Tensor, nn

import natgrad
from natgrad import KFAC, SPNGD, Every, Paced, Polar
from natgrad.layers import Block
from natgrad.layers.matrices import Linear
from natgrad.math.parts import diagonal_parts

DAMPING = 0.3
LAYERS = (
    "linear",
    "linear-no-bias",
    "linear-3d",
    "hf-conv1d",
    "conv2d",
    "conv2d-pointwise",
    "conv2d-groups",
    "embedding",
)
RULES: dict[str, dict[str, Any]] = {
    "eigen": {},
    "tracked": {"rule": natgrad.Kronecker(basis="tracked")},
    "factored": {"rule": natgrad.Kronecker(style="factored")},
    "relative": {"rule": natgrad.Kronecker(style="relative")},
    "inputs": {"rule": natgrad.Kronecker(sides="inputs")},
    "outputs": {"rule": natgrad.Kronecker(sides="outputs")},
    "orthogonal": {"rule": natgrad.Orthogonal()},
    "full": {
        "rule": natgrad.Orthogonal(sides="inputs", whitening="full", style="factored")
    },
    "adaptive": {"rule": natgrad.EigenAdam()},
    "corrected": {"rule": natgrad.EKFAC()},
    "corrected-relative": {"rule": natgrad.EKFAC(style="relative")},
}


def between_parts(x: Tensor, size: int) -> Tensor:
    """Whole factors ``(s, n, n)`` with zeros where two parts of a size meet."""
    part = torch.arange(x.shape[-1]) // size
    return torch.where(part[:, None] == part, x, 0.0)


def updates(name: str, steps: int = 3, **options: Any) -> list[Tensor]:
    """What KFAC makes of the gradients of a few batches, without moving weights."""
    row = KRONECKER[name]
    model, _, _ = build(row)
    settings: dict[str, Any] = {
        "damping": DAMPING,
        "length": natgrad.Free(),
        "factor_decay": 0.5,
    }
    settings |= {"refresh": Every()}
    found: list[Tensor] = []
    with construct(KFAC, model, **settings | row.options | options) as kfac:
        for _ in range(steps):
            x, y = draw(row, 6)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            kfac.step()
            found.append(layer_gradient(model.layer))
    return found


def sizes(name: str, largest: int | None) -> dict[str, int]:
    with construct(
        KFAC,
        build(KRONECKER[name])[0],
        length=natgrad.KLClip(lr=1.0),
        largest_factor=largest,
    ) as kfac:
        specs = kfac.engine.block["layer"].spec.statistics
        return {s.kind: s.size for s in specs if not s.diagonal}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_cut_factor_is_the_whole_one_with_zeros_between_its_parts(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = sizes(name, 2)
    assert parts != sizes(name, None)
    cut = updates(name, largest_factor=2, **RULES[rule])

    def zeroed(_: Block, kind: str, moment: Tensor) -> Tensor:
        return between_parts(moment, parts[kind]) if kind in parts else moment

    monkeypatch.setattr(Block, "in_parts", zeroed)
    want = updates(name, **RULES[rule])
    for found, expected in zip(cut, want, strict=True):
        oracle.near(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_cutting_changes_the_update(name: str) -> None:
    cut, whole = updates(name, 1, largest_factor=2), updates(name, 1)
    assert (cut[0] - whole[0]).norm() > 1e-6 * whole[0].norm()


@pytest.mark.parametrize("style", ["eigen", "factored"])
@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding"])
def test_a_cut_factor_by_brute_force(name: str, style: Any) -> None:
    row = KRONECKER[name]
    model, x, y = build(row)
    batch = oracle.examples(model, "layer", x, y)
    options: dict[str, Any] = {
        "rule": natgrad.Kronecker(style=style),
        "refresh": Every(),
    }
    options |= {"damping": DAMPING, "length": natgrad.Free(), "largest_factor": 2}
    with construct(KFAC, model, **options) as kfac:
        F.cross_entropy(model(x), y).backward()
        plain = layer_gradient(model.layer)
        kfac.step()
        found = {k: kfac.statistic(f"layer/{k}") for k in "AG"}
    whole = dict(zip("AG", oracle.factors(batch), strict=True))
    for kind, size in sizes(name, 2).items():
        rows = whole[kind].shape[-1]
        near(found[kind], diagonal_parts(whole[kind], -(-rows // size), size))
        whole[kind] = between_parts(whole[kind], size)
    a, g = whole["A"], whole["G"]
    if style == "eigen":
        want = oracle.solve(oracle.kronecker(g, a), plain, DAMPING)
    else:
        want = oracle.solve_factored(a, g, plain, DAMPING)
    near(layer_gradient(model.layer), want)


def test_without_damping_padding_is_not_singular() -> None:
    """Five rows in parts of two, of more examples than inputs."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x = torch.randn(40, 4, dtype=torch.float64)
    options: dict[str, Any] = {
        "damping": 0.0,
        "rule": natgrad.Kronecker(sides="inputs"),
        "length": natgrad.Free(),
    }
    with construct(KFAC, model, largest_factor=2, **options) as kfac:
        model(x).square().sum(1).mean().backward()
        plain = layer_gradient(model)
        kfac.step()
    inputs = torch.cat((x, torch.ones_like(x[:, :1])), 1)
    a = between_parts((inputs.T @ inputs / 40)[None], 2)
    near(layer_gradient(model), plain @ a.inverse())


def test_a_full_norm_statistic_is_cut_as_well() -> None:
    row = next(NORM[name] for name in NORM if NORM[name].norm == "full")
    model, x, y = build(row)
    with construct(
        KFAC, model, length=natgrad.Free(), largest_factor=2, **row.options
    ) as kfac:
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        found = kfac.statistic("layer/full")
    whole = oracle.norm_statistic(oracle.examples(model, "layer", x, y), "full")
    near(found, diagonal_parts(whole, -(-whole.shape[-1] // 2), 2))


class Dense(Linear):
    """A kind of somebody else's, which knows nothing of parts."""

    name = "dense"

    def part_size(self, module: nn.Module, side: str) -> int:
        return self.layout(module).cut(side, None)[1]


class Own(nn.Linear):
    pass


def test_a_kind_with_whole_moments_is_cut_too() -> None:
    natgrad.register_layer(Own, Dense)
    found: list[Tensor] = []
    for kind in (nn.Linear, Own):
        torch.manual_seed(0)
        model = kind(4, 3).double()
        with construct(
            KFAC, model, length=natgrad.KLClip(lr=1.0), largest_factor=2
        ) as kfac:
            model(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()
            kfac.step()
            found.append(layer_gradient(model))
    near(found[1], found[0])


# -- whole runs ------------------------------------------------------------------------

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "kfac": ("kfac", {"refresh": Every(2, 3)}),
    "ekfac": ("kfac", {"rule": natgrad.EKFAC()}),
    "spngd": ("spngd", {"norm": "full"}),
    "polar": ("polar", {"refresh": Every(2, 2)}),
    "paced": ("kfac", {"refresh": Paced(Every(2, 1), share=0.5)}),
}
CUT = {"largest_factor": 7, "damping": 0.1}
CASES = {
    name: Case(method=method, options=options | CUT, steps=6)
    for name, (method, options) in OPTIONS.items()
}


def train_all(rank: int) -> dict[str, Tensor]:
    return {name: train(case)[0] for name, case in CASES.items()}


@pytest.mark.processes
def test_two_ranks_equal_one_with_cut_factors() -> None:
    alone, together = train_all(0), run_world(2, train_all)
    for name, expected in alone.items():
        for result in together:
            assert (result[name] - expected).abs().max() < 1e-10, name


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_cut_factors_resumes_exactly(name: str) -> None:
    whole, _, _ = train(CASES[name])
    _, natural, _ = train(CASES[name], slice(3), save=True)
    start = saved_and_loaded(natural.saved)
    resumed, _, _ = train(CASES[name], slice(3, None), start=start)
    assert torch.equal(whole, resumed)


def test_a_state_of_other_parts_is_refused() -> None:
    model = nn.Linear(4, 3)
    state = construct(
        KFAC, model, length=natgrad.KLClip(lr=1.0), largest_factor=3
    ).state_dict()
    with pytest.raises(ValueError, match=r"size 3 .*Must be 5 .*largest_factor"):
        KFAC(nn.Linear(4, 3), length=natgrad.KLClip(lr=1.0)).load_state_dict(state)


def test_the_spectrum_of_a_cut_factor_has_nothing_of_its_padding() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    x = torch.randn(40, 6, dtype=torch.float64)
    looks: list[dict[str, Any]] = []
    for style in ("eigen", "factored"):
        model.zero_grad()
        options: dict[str, Any] = {
            "rule": natgrad.Kronecker(style=style),
            "largest_factor": 3,
        }
        with construct(KFAC, model, length=natgrad.KLClip(lr=1.0), **options) as kfac:
            kfac.watch(every=1)
            model(x).square().sum(1).mean().backward()
            kfac.step()
            looks.append(kfac.diagnostics()["statistics"]["model/A"])
    inputs = torch.cat((x, torch.ones_like(x[:, :1])), 1)
    values = torch.linalg.eigvalsh(between_parts((inputs.T @ inputs / 40)[None], 3))
    for look in looks:
        assert look["size"] == 7
        assert look["smallest"] == pytest.approx(float(values.min()))
        assert look["largest"] == pytest.approx(float(values.max()))
        rank = float(values.sum() ** 2 / values.square().sum())
        assert look["effective_rank"] == pytest.approx(rank)


# -- a large layer ---------------------------------------------------------------------


class Digits(nn.Module):
    """The end of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(9216, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


MAKERS = {
    "polar": lambda model: Polar(model, lr=0.02),
    "spngd": lambda model: SPNGD(model, lr=0.01),
    "kfac": lambda model: KFAC(model, length=natgrad.KLClip(lr=0.01)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_layer_of_nine_thousand_inputs_takes_a_step(name: str) -> None:
    """Whole, its factor would take 340 MB, and a minute and more to invert."""
    torch.manual_seed(0)
    model = Digits()
    with MAKERS[name](model) as natural:
        F.cross_entropy(model(torch.randn(8, 9216)), torch.arange(8)).backward()
        natural.step()
        specs = natural.engine.block["fc1"].spec.statistics
        assert (specs[0].parts, specs[0].size) == (9, 1025)
        inverse = natural.engine.statistics.states["fc1/A"].inverse
        assert inverse is not None
        packed = (9, 1025 * 1026 // 2)
        assert inverse[0].shape == (packed if name == "polar" else (9, 1025, 1025))
        assert model.fc1.weight.isfinite().all()


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "all"])
def test_the_largest_factor_must_be_a_count(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="Invalid largest_factor"):
        construct(
            KFAC, nn.Linear(2, 2), length=natgrad.KLClip(lr=1.0), largest_factor=value
        )
