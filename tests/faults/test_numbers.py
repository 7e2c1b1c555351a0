"""Hostile numbers: what a step makes of them is finite and a descent, on all ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.poison import METHODS, Poison, fail_to_invert, train_poisoned
from tests.support.construct import construct
from tests.support.toys import backward, mlp, parameters, sgd, train
from tests.support.world import run_world
from torch import Tensor, nn

import natgrad
from natgrad.distributed.communicator import CommOptions

FINITE = {"allow_nan": False, "allow_infinity": False}


def factor(kind: str, rows: int, size: int, scale: float, seed: int) -> Tensor:
    """Examples whose second moment is of a hostile kind."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator)
    if kind == "deficient":
        x = x[:, :1] * torch.randn(1, size, generator=generator)
    elif kind == "one hot":
        x = torch.eye(size)[torch.arange(rows) % size]
    elif kind == "zero":
        x = torch.zeros(rows, size)
    elif kind == "spread":
        x = x * torch.logspace(-6, 6, size)
    return x * scale


KINDS = ["full", "deficient", "one hot", "zero", "spread"]
SCALES = [1e-42, 1e-30, 1e-20, 1e-15, 1e-6, 1.0, 1e6, 1e12, 1e18]
"""Of inputs; the square of 1e-20 is denormal in float32, that of 1e-30 is zero."""
RULES: dict[str, dict[str, Any]] = {
    "eigen": {"rule": natgrad.Kronecker(style="eigen")},
    "factored": {"rule": natgrad.Kronecker(style="factored")},
    "relative": {"rule": natgrad.Kronecker(style="relative")},
    "corrected": {"rule": natgrad.EKFAC(style="eigen")},
    "adaptive": {"rule": natgrad.EigenAdam()},
    "orthogonal": {"rule": natgrad.Orthogonal()},
    "inputs": {
        "rule": natgrad.Orthogonal(sides="inputs", whitening="full", style="factored")
    },
    "outputs": {"rule": natgrad.Kronecker(sides="outputs", style="relative")},
}


def layer(kind: str, size: int) -> nn.Module:
    """A linear layer, or a convolution that has as many inputs."""
    if kind == "linear":
        return nn.Linear(size, 3)
    return nn.Sequential(nn.Unflatten(1, (1, size)), nn.Conv1d(1, 3, 3, padding=1))


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """A batch, a loss scale and an update rule."""

    kind: str
    scale: float
    gradient: float
    rows: int
    size: int
    module: str
    rule: str
    damping: float
    dtype: torch.dtype
    seed: int

    def model(self) -> nn.Module:
        """One layer in the asked type."""
        torch.manual_seed(self.seed)
        return layer(self.module, self.size).to(self.dtype)

    def gradients(self, model: nn.Module) -> list[Tensor]:
        """Copies of what a backward has given every parameter."""
        x = factor(self.kind, self.rows, self.size, self.scale, self.seed)
        outputs = model(x.to(self.dtype))
        weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))
        (outputs.float() * weights * self.gradient).mean().backward()
        return [_of(p).double() for p in model.parameters()]


HOSTILE = st.builds(
    Hostile,
    kind=st.sampled_from(KINDS),
    scale=st.sampled_from(SCALES),
    gradient=st.sampled_from(SCALES[1:-1]),
    rows=st.integers(1, 6),
    size=st.integers(1, 5),
    module=st.sampled_from(["linear", "convolution"]),
    rule=st.sampled_from([*RULES]),
    damping=st.sampled_from([1e-12, 1e-6, 1e-3, 1.0, 1e6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 100),
)


def require_descent(case: Hostile, before: list[Tensor], after: list[Tensor]) -> None:
    """Finite, and its product with the gradient is positive but for rounding."""
    assert all(bool(g.isfinite().all()) for g in after), case
    old, new = (torch.cat([x.flatten() for x in xs]) for xs in (before, after))
    # An update is rounded to the parameters' type when it is written.
    rounding = 0.0 if case.dtype == torch.float32 else torch.finfo(case.dtype).eps
    assert torch.dot(old, new) > -rounding * old.norm() * new.norm() - 1e-30, case


def kfac_on(case: Hostile) -> bool:
    """Whether the step was taken, which must then be a descent."""
    model = case.model()
    options: dict[str, Any] = {"length": natgrad.Free(), "damping": case.damping}
    options |= RULES[case.rule]
    with natgrad.KFAC(model, **options) as kfac:
        before = case.gradients(model)
        if not all(bool(g.isfinite().all()) for g in before):
            return False  # the gradient itself is beyond its type
        kfac.step()
        if kfac.health()["skipped_steps"]:  # its norm is
            return False
        require_descent(case, before, [_of(p).double() for p in model.parameters()])
    return True


def spngd_on(case: Hostile) -> bool:
    """The same, seen by the change of the weights, which are at zero before it."""
    model = case.model()
    options: dict[str, Any] = {"momentum": 0.0, "damping": case.damping}
    options |= RULES[case.rule]
    with construct(natgrad.SPNGD, model, lr=1e-6, **options) as spngd:
        before = case.gradients(model)
        if not all(bool(g.isfinite().all()) for g in before):
            return False
        for p in model.parameters():
            p.data.zero_()
        spngd.step()
        if spngd.health()["skipped_steps"]:
            return False
        changes = [-p.detach().double() for p in model.parameters()]
        assert all(bool(x.isfinite().all()) for x in changes), case
        require_descent(case, before, changes)
    return True


@pytest.mark.filterwarnings("ignore:Step 0 is skipped", "ignore:The inverse of")
@pytest.mark.parametrize("method", [kfac_on, spngd_on])
def test_any_factor_gives_a_finite_descent(method: Callable[[Hostile], bool]) -> None:
    taken: list[bool] = []

    @settings(deadline=None, max_examples=80, database=None)
    @given(HOSTILE)
    def every(case: Hostile) -> None:
        taken.append(method(case))

    every()
    assert sum(taken) >= 0.75 * len(taken), "most examples were skipped"


@pytest.mark.parametrize("method", [kfac_on, spngd_on])
@pytest.mark.parametrize(
    ("rule", "damping", "kind", "scale"),
    [("relative", 1e6, "spread", 1e12), ("factored", 1.0, "full", 1e18)],
)
def test_a_damping_beyond_float32(
    method: Callable[[Hostile], bool],
    rule: str,
    damping: float,
    kind: str,
    scale: float,
) -> None:
    """Relative to a huge factor, or as the pi-split gives it to one of two."""
    gradient = 1e-6 if rule == "relative" else 1e-20
    shape: dict[str, Any] = {"rows": 2, "size": 3, "module": "convolution", "seed": 21}
    case = {"kind": kind, "scale": scale, "rule": rule, "damping": damping}
    assert method(Hostile(gradient=gradient, dtype=torch.bfloat16, **case, **shape))


def _of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad.clone()


def singular(case: str) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU())
    model.append(nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    if case == "one example":
        x, y = x[:1], y[:1]
    elif case == "equal examples":
        x, y = x[:1].expand(6, 4), y[:1].expand(6)
    elif case == "dead ReLU":
        nn.init.constant_(model[2].bias, -1e6)
    elif case == "frozen":
        model[2].requires_grad_(False)
    elif case == "zero input":
        x = torch.zeros_like(x)
    return model, x, y


CASES = ["one example", "equal examples", "dead ReLU", "frozen", "zero input"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["kfac", "spngd"])
@pytest.mark.filterwarnings("ignore:KFAC saw no", "ignore:natgrad saw no")
def test_singular_batches_and_dead_layers(case: str, method: str) -> None:
    model, x, y = singular(case)
    optimizer: Any = natgrad.SPNGD(model, lr=0.01, damping=1e-3)
    if method == "kfac":
        optimizer.close()
        length = natgrad.KLClip(kappa=1e-3)  # 12 steps must show that it learns
        optimizer = sgd(model, refresh=natgrad.Every(), length=length)[0]
    frozen = model[2].weight.detach().clone()
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert torch.equal(frozen, model[2].weight) == (case in ("frozen", "dead ReLU"))


def test_a_layer_added_to_a_run() -> None:
    """KFAC leaves it to the optimizer; SPNGD, which would not train it, says so."""
    model: Any = mlp(torch.float32)
    optimizer, _ = sgd(model)
    train(model, optimizer, range(2))
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": list(model[4].parameters())})
    before = parameters(model)
    train(model, optimizer, range(2, 4))
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not any(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )
    other = mlp(torch.float32)
    spngd = natgrad.SPNGD(other, lr=0.01)
    train(other, spngd, range(2))
    other.append(nn.Linear(3, 3))
    backward(other, 2)
    with pytest.raises(RuntimeError, match=r"4\.weight was added, frozen or unfrozen"):
        spngd.step()


@pytest.mark.parametrize("method", ["kfac", "spngd"])
def test_a_layer_frozen_in_a_run(method: str) -> None:
    """It stays as it is, and what is left goes on."""
    model: Any = mlp(torch.float32)
    optimizer: Any = natgrad.SPNGD(model, lr=0.01, momentum=0.0)
    if method == "kfac":
        optimizer.close()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        natgrad.KFAC(model, optimizer, refresh=natgrad.Every())
    train(model, optimizer, range(2))
    model[0].requires_grad_(False)
    before = parameters(model)
    train(model, optimizer, range(2, 5))
    moved = [
        not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    ]
    assert moved == [False, False, True, True, True, True]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


POISONS = [
    Poison(step=step, place=place, value=value, rank=rank)
    for step, (place, value, rank) in enumerate(
        [
            ("batch", math.nan, 0),
            ("activation", math.inf, 1),
            ("gradient", -math.inf, None),
            ("statistic", math.nan, 1),
            ("inverse", math.nan, None),
            ("batch", math.inf, None),
            ("gradient", math.nan, 1),
            ("statistic", math.inf, None),
            ("inverse", math.inf, 1),
        ]
    )
]


@pytest.mark.processes
@pytest.mark.parametrize("method", METHODS)
def test_poison_on_one_rank_or_all_is_met_alike(method: str) -> None:
    ranks = run_world(2, train_poisoned, method, POISONS)
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert all(rank["finite"] and rank["alike"] for rank in ranks)
    assert ranks[0]["health"] == ranks[1]["health"]
    health = ranks[0]["health"]
    # a step that a GradScaler skips never comes to natgrad
    assert health["skipped_steps"] == (0 if method == "scaler" else 5)
    assert sum(health["quarantined"].values()) == 2
    assert [rank["failed"] for rank in ranks] == [2, 2]
    assert health["failures"] == {}  # the next inversions succeeded


@pytest.mark.processes
def test_three_failures_in_a_row_are_an_error_on_every_rank() -> None:
    """Only rank 1 fails to invert; both are told in the third step of it."""
    first, second = run_world(2, fail_to_invert)
    assert first == second
    assert first.startswith("2: ")
    assert "3 time(s) in a row" in first


def _scaled_alone(rank: int) -> str:
    scaler, model = torch.amp.GradScaler("cpu"), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        natgrad.KFAC(model, optimizer, grad_scaler=scaler)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.processes
def test_a_scaler_needs_averaged_gradients_on_several_ranks() -> None:
    for text in run_world(2, _scaled_alone):
        assert "wrap the model in DistributedDataParallel" in text


def _huge_inverse(rank: int) -> bool:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    comm = CommOptions(precision=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    construct(
        natgrad.KFAC,
        model,
        optimizer,
        damping=1e-9,
        rule=natgrad.Kronecker(style="factored"),
        comm=comm,
    )
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(4, 3) * 1e-5) * 1e-5).sum().backward()
        optimizer.step()
    return all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.processes
def test_an_inverse_beyond_float16_is_sent_at_its_limit() -> None:
    assert run_world(2, _huge_inverse) == [True, True]
