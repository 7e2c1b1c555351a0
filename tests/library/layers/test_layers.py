"""Every layer kind's statistics against a loop over examples, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import oracle
from tests.support.construct import construct
from tests.support.layer_table import EMBEDDING, KRONECKER, NORM, ROWS, Row, build
from tests.support.oracle import near
from torch import Tensor, nn

import natgrad
from natgrad import KFAC, Every

EVERY_STEP = Every(statistics=1, inverses=1)


def kfac_of(model: nn.Module, **options: Any) -> KFAC:
    options = {
        "length": natgrad.Free(),
        "refresh": EVERY_STEP,
        "factor_decay": 0.9,
    } | options
    return construct(KFAC, model, **options)


def step(kfac: KFAC, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Forward, backward and one K-FAC step on a mean cross-entropy."""
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    kfac.step()


def expected(row: Row, batch: list[oracle.Example]) -> dict[str, Tensor]:
    """The statistics of a row's layer by brute force, by kind."""
    if row.norm:
        return {row.norm: oracle.norm_statistic(batch, row.norm)}
    a, g = oracle.factors(batch, reduce=row.options.get("sharing") == "reduce")
    if row.is_embedding:
        off_diagonal = a - a.diagonal(dim1=1, dim2=2).diag_embed()
        assert not off_diagonal.any()
        a = a.diagonal(dim1=1, dim2=2)
    return {"A": a, "G": g}


@pytest.mark.parametrize("name", KRONECKER)
def test_the_oracle_factors_make_the_gradient(name: str) -> None:
    """Sum of g a^T over uses is autograd's gradient: columns are ordered alike."""
    model, x, y = build(KRONECKER[name])
    for e in oracle.examples(model, "layer", x, y):
        near(e.outputs.mT @ e.inputs, e.gradient)


@pytest.mark.parametrize("name", ROWS)
def test_statistics(name: str) -> None:
    row = ROWS[name]
    model, x, y = build(row)
    want = expected(row, oracle.examples(model, "layer", x, y))
    with kfac_of(model, **row.options) as kfac:
        step(kfac, model, x, y)
        for kind, value in want.items():
            near(kfac.statistic(f"layer/{kind}"), value)


@pytest.mark.parametrize("name", ROWS)
def test_a_gradient_folds_and_unfolds(name: str) -> None:
    """The block's stack is the oracle's; writing it back changes nothing."""
    row = ROWS[name]
    model, x, y = build(row)
    with kfac_of(model, **row.options) as kfac:
        F.cross_entropy(model(x), y).backward()
        block = kfac.engine.block["layer"]
        grads = [
            p.grad.clone() for p in oracle.trained(model.layer) if p.grad is not None
        ]
        stack = block.gradient()
        assert stack is not None
        want = oracle.as_stack(model.layer, grads)
        torch.testing.assert_close(stack, want.reshape(stack.shape), rtol=0, atol=0)
        block.write_gradient(2 * stack)
        for p, g in zip(block.parameters, grads, strict=True):
            torch.testing.assert_close(p.grad, 2 * g, rtol=0, atol=0)


EXACT = {
    "linear": KRONECKER["linear"],
    "linear-no-bias": KRONECKER["linear-no-bias"],
    "linear-one-position": Row(layer=lambda: nn.Linear(3, 2), shape=(1, 3)),
    "conv1d": Row(layer=lambda: nn.Conv1d(2, 3, 4), shape=(2, 4)),
    "conv2d": Row(layer=lambda: nn.Conv2d(2, 3, 3), shape=(2, 3, 3)),
    "conv2d-padded": Row(
        layer=lambda: nn.Conv2d(2, 3, 3, padding=1, stride=3), shape=(2, 2, 2)
    ),
    "conv2d-depthwise": Row(
        layer=lambda: nn.Conv2d(2, 4, 2, groups=2), shape=(2, 2, 2)
    ),
    "conv3d": Row(layer=lambda: nn.Conv3d(1, 2, 2), shape=(1, 2, 2, 2)),
    "embedding": EMBEDDING["embedding-single"],
}


@pytest.mark.parametrize("name", EXACT)
def test_one_example_and_one_use_make_the_exact_fisher(name: str) -> None:
    row = EXACT[name]
    model, x, y = build(row, count=1)
    exact = oracle.exact_fisher(oracle.examples(model, "layer", x, y))
    with kfac_of(model) as kfac:
        step(kfac, model, x, y)
        a, g = kfac.statistic("layer/A"), kfac.statistic("layer/G")
    near(oracle.kronecker(g, a), exact)


@pytest.mark.parametrize("name", [n for n in NORM if n.endswith("-full")])
def test_a_full_norm_block_is_the_exact_fisher(name: str) -> None:
    model, x, y = build(NORM[name])
    batch = oracle.examples(model, "layer", x, y)
    rows = [e.gradient.flatten() for e in batch]
    exact = torch.stack([torch.outer(r, r) for r in rows]).mean(0)
    with kfac_of(model, norm="full") as kfac:
        step(kfac, model, x, y)
        near(kfac.statistic("layer/full")[0], exact)


def test_a_channels_last_batch_has_the_same_statistics() -> None:
    model, x, y = build(KRONECKER["conv2d"])
    a, g = oracle.factors(oracle.examples(model, "layer", x, y))
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    with kfac_of(model) as kfac:
        step(kfac, model, x.to(memory_format=torch.channels_last), y)
        near(kfac.statistic("layer/A"), a)
        near(kfac.statistic("layer/G"), g)


class Behind(nn.Module):
    """A convolution whose gradient comes through a batch norm in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, probe: Tensor | float = 0.0) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x) + probe)).flatten(1))


def test_a_layer_before_batch_norm_sees_the_gradient_through_the_batch() -> None:
    """ghat is N times the batch loss's gradient at the example's own output."""
    torch.manual_seed(0)
    model = Behind().double()
    x, y = torch.randn(4, 2, 3, 3).double(), torch.randint(3, (4,))
    probe = torch.zeros(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(model(x, probe), y)
    (g,) = torch.autograd.grad(loss, probe)
    rows = 4 * g.permute(0, 2, 3, 1).reshape(-1, 3)
    want = torch.stack([torch.outer(r, r) for r in rows]).sum(0) / 4
    with kfac_of(model, norm="unit") as kfac:
        step(kfac, model, x, y)
        near(kfac.statistic("conv/G")[0], want)
        batch = oracle.examples(model, "norm", x, y)
        unit = oracle.norm_statistic(batch, "unit")
        near(kfac.statistic("norm/unit"), unit)


class Tied(nn.Module):
    """Two linear layers with one weight, and one of them used twice."""

    def __init__(self, *, share_bias: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=bias)
        self.second = nn.Linear(3, 3, bias=bias)
        self.second.weight = self.first.weight
        if share_bias:
            self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("bias", [True, False])
def test_tied_layers_are_one_block(bias: bool) -> None:
    torch.manual_seed(0)
    model = Tied(bias=bias).double()
    x, y = torch.randn(4, 3).double(), torch.randint(3, (4,))
    batch = oracle.examples(model, ["first", "second"], x, y)
    assert batch[0].inputs.shape[1] == 3
    for e in batch:
        near(e.outputs.mT @ e.inputs, e.gradient)
    a, g = oracle.factors(batch)
    with kfac_of(model) as kfac:
        step(kfac, model, x, y)
        near(kfac.statistic("first/A"), a)
        near(kfac.statistic("first/G"), g)
        assert list(kfac.engine.block) == ["first"]
        assert "shared with second" in kfac.report()


def test_a_tied_weight_with_another_bias_leaves_the_second_use_out() -> None:
    torch.manual_seed(0)
    model = Tied(share_bias=False).double()
    x, y = torch.randn(4, 3).double(), torch.randint(3, (4,))
    a, g = oracle.factors(oracle.examples(model, "first", x, y))
    with kfac_of(model) as kfac:
        step(kfac, model, x, y)
        near(kfac.statistic("first/A"), a)
        near(kfac.statistic("first/G"), g)
        assert list(kfac.engine.block) == ["first", "second.bias"]
        assert "leave out its use as second" in kfac.report()


class LanguageModel(nn.Module):
    """An output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)).mean(1))


def test_a_linear_layer_tied_to_an_embedding_is_not_in_its_statistics() -> None:
    """But the gradient that is preconditioned holds both uses."""
    torch.manual_seed(0)
    model = LanguageModel().double()
    x, y = torch.randint(5, (4, 3)), torch.randint(5, (4,))
    a, g = oracle.factors(oracle.examples(model, "embedding", x, y))
    with kfac_of(model, damping=0.1) as kfac:
        F.cross_entropy(model(x), y).backward()
        grad = model.head.weight.grad
        assert grad is not None
        stack = grad.T.unsqueeze(0).clone()
        kfac.step()
        diagonal = a.diagonal(dim1=1, dim2=2)
        near(kfac.statistic("embedding/A"), diagonal)
        near(kfac.statistic("embedding/G"), g)
        want = oracle.solve(oracle.kronecker(g, a), stack, 0.1)
        torch.testing.assert_close(grad.T.unsqueeze(0), want, rtol=1e-9, atol=1e-12)
        assert "leave out its use as head" in kfac.report()


class Repeated(nn.Module):
    """One module of each kind, used several times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.GroupNorm(1, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.conv(x))
        return self.head(x.flatten(1))


def test_a_module_used_several_times_in_one_forward() -> None:
    torch.manual_seed(0)
    model = Repeated().double()
    x, y = torch.randn(4, 2, 2, 2).double(), torch.randint(3, (4,))
    batch = oracle.examples(model, "conv", x, y)
    assert batch[0].inputs.shape[1] == 3 * 4
    a, g = oracle.factors(batch)
    with kfac_of(model) as kfac:
        step(kfac, model, x, y)
        near(kfac.statistic("conv/A"), a)
        near(kfac.statistic("conv/G"), g)
