"""Which modules have a block: subclasses, other names, and layers nobody knows."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import oracle
from tests.support.oracle import near
from torch import Tensor, nn

import natgrad
from natgrad import KFAC, SPNGD, Every, Free, Polar
from natgrad.layers.table import TABLE


@pytest.fixture
def rows() -> Iterator[None]:
    """Leaves the table as it was."""
    known = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(known)


def optimizers(model: nn.Module) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """Each optimizer on a model, one after the other."""
    host = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kfac = KFAC(model, host, refresh=Every())
    yield kfac, host
    kfac.close()
    for make in (SPNGD, Polar):
        with make(model, lr=1e-3) as optimizer:
            yield optimizer, optimizer


def learns(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Two steps of each optimizer: all parameters move, and stay finite."""
    for _, stepper in optimizers(model):
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            stepper.zero_grad()
            loss().backward()
            stepper.step()
        for (name, p), old in zip(model.named_parameters(), before, strict=True):
            assert p.isfinite().all(), name
            assert not torch.equal(p, old), name


def row(kfac: Any, name: str) -> str:
    """The row of a parameter in the report."""
    return next(x for x in kfac.report().splitlines() if x.split()[0] == name)


# -- subclasses -----------------------------------------------------------------------


class Positions(nn.Embedding):
    """Makes its own positions, as those of BART, OPT and Whisper do."""

    def forward(self, tokens: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(torch.arange(tokens.shape[1]))


class Normalised(nn.Linear):
    """Normalises what it is given."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.normalize(input, dim=-1))


class Standardised(nn.Conv1d):
    """Another weight than its own, below `forward`."""

    def _conv_forward(self, input: Any, weight: Any, bias: Any) -> Tensor:
        weight = weight - weight.mean((1, 2), keepdim=True)
        return super()._conv_forward(input, weight, bias)


class Same(nn.Linear):
    """Computes what its parent does."""

    def extra_repr(self) -> str:
        return "the same"


class Text(nn.Module):
    """One of each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 6), Positions(9, 6)
        self.normalised, self.same = Normalised(6, 6), Same(6, 6)
        self.conv = Standardised(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(tokens)
        x = torch.tanh(self.same(torch.tanh(self.normalised(1000 * x))))
        return self.head(self.conv(x.mT).mT)


def test_a_subclass_that_computes_something_else_has_no_block() -> None:
    torch.manual_seed(0)
    model, tokens = Text(), torch.randint(9, 50, (4, 7))
    with KFAC(model, length=natgrad.Free()) as kfac:
        known = {b.name for b in kfac.engine.blocks if b.kind is not None}
        assert known == {"words", "same", "head"}
        for name, reason in {
            "places.weight": "Positions overrides Embedding.forward: register_layer",
            "normalised.weight": "Normalised overrides Linear.forward",
            "conv.bias": "Standardised overrides Conv1d._conv_forward",
        }.items():
            assert reason in row(kfac, name)

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    learns(model, loss)


def test_a_forward_that_was_replaced_on_one_module_counts_as_overridden() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].forward = lambda input: F.linear(2 * input, model[0].weight)  # pyright: ignore
    with KFAC(model, length=natgrad.Free()) as kfac:
        assert "Linear overrides Linear.forward" in row(kfac, "0.weight")
        assert kfac.engine.block["1"].kind is not None


@pytest.mark.usefixtures("rows")
def test_a_subclass_that_is_registered_has_its_parent_s_block() -> None:
    class Logged(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    class Child(Logged):
        pass

    class Other(Logged):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    natgrad.register_layer(Logged, "linear")
    model = nn.Sequential(Logged(3, 3), Child(3, 3), Other(3, 3))
    with KFAC(model, length=natgrad.Free()) as kfac:
        kinds = [b.kind is not None for b in kfac.engine.blocks]
        assert kinds == [True, True, False, False]


# -- other names ----------------------------------------------------------------------


class Dense(nn.Module):
    """A linear layer with names and an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3))
        self.offset = nn.Parameter(torch.randn(3))

    def forward(self, scale: float, x: Tensor) -> Tensor:
        return x @ self.kernel + self.offset


class OneDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = Dense()

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(1.0, x)


@pytest.mark.usefixtures("rows")
def test_a_weight_and_a_bias_of_other_names() -> None:
    torch.manual_seed(0)
    model, x, y = OneDense().double(), torch.randn(8, 4).double(), torch.arange(8) % 3
    twin = nn.Linear(4, 3).double()
    with torch.no_grad():
        twin.weight.copy_(model.dense.kernel.T)
        twin.bias.copy_(model.dense.offset)
    a, g = oracle.factors(oracle.examples(nn.Sequential(twin), "0", x, y))
    natgrad.register_layer(Dense, "transposed_linear", weight="kernel", bias="offset")
    with KFAC(model, length=natgrad.Free(), refresh=Every(), damping=0.1) as kfac:
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(twin(x), y).backward()
        kfac.step()
        near(kfac.statistic("dense/A"), a)
        near(kfac.statistic("dense/G"), g)
        grads = [p.grad for p in (twin.weight, twin.bias) if p.grad is not None]
        want = oracle.solve(oracle.kronecker(g, a), oracle.as_stack(twin, grads), 0.1)
        assert model.dense.kernel.grad is not None
        near(model.dense.kernel.grad.T, want[0, :, :-1], rtol=1e-9)
        near(model.dense.offset.grad, want[0, :, -1], rtol=1e-9)


@pytest.mark.usefixtures("rows")
def test_a_row_that_names_no_parameter_says_how_to_name_it() -> None:
    natgrad.register_layer(Dense, "linear")
    model = nn.Sequential(OneDense(), nn.Linear(3, 3))
    with KFAC(model, length=natgrad.Free()) as kfac:
        reason = "its Dense has no parameter 'weight': register_layer can name it"
        assert reason in row(kfac, "0.dense.kernel")


# -- layers nobody knows --------------------------------------------------------------


class GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.shift = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return edges @ x @ self.kernel + self.shift


class GCN(nn.Module):
    """Not one layer that natgrad knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphConv(5, 6), GraphConv(6, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x, edges)), edges)


def test_polar_trains_a_model_without_a_known_layer() -> None:
    torch.manual_seed(0)
    model, x, y = GCN(), torch.randn(12, 5), torch.arange(12) % 3
    edges = torch.eye(12) + torch.softmax(torch.randn(12, 12), 1)
    with pytest.warns(UserWarning, match="no trainable layer of a known kind.*Adam"):
        optimizer = Polar(model, lr=0.1)
    losses: list[float] = []
    with optimizer:
        for _ in range(30):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, edges), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert "0 blocks, 0 of 57 trained parameters" in optimizer.report()
        assert "57 parameters without a block follow Adam" in optimizer.report()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
    assert losses[-1] < 0.8 * losses[0]


def test_a_model_that_is_frozen_has_nothing_to_fall_back_on() -> None:
    with pytest.raises(ValueError, match="no trainable layer"):
        Polar(GCN().requires_grad_(False), lr=0.1)


@pytest.mark.parametrize("make", [partial(KFAC, length=Free()), partial(SPNGD, lr=0.1)])
def test_the_others_refuse_it_and_say_what_to_do(make: Any) -> None:
    with pytest.raises(ValueError, match=r"GraphConv.*register_layer.*weight="):
        make(GCN())


class Experts(nn.Module):
    """Three experts in one tensor each, as Mixtral keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 6, 4) / 2)
        self.down = nn.Parameter(torch.randn(3, 4, 6) / 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(torch.einsum("bi,eoi->ebo", x, self.up))
        return torch.einsum("ebi,eoi->bo", inner, self.down)


class RMSNorm(nn.Module):
    """Somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class First(nn.Module):
    """The first of what a layer returns."""

    def __init__(self, layer: nn.Module, arguments: int = 1) -> None:
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.arguments)[0]


class Both(nn.Module):
    """A layer with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


weight_norm = nn.utils.parametrizations.weight_norm
spectral_norm = nn.utils.parametrizations.spectral_norm

UNKNOWN: dict[str, tuple[Callable[[], nn.Module], int, str, str]] = {
    "lstm": (lambda: First(nn.LSTM(4, 4)), 4, "layer.weight_ih_l0", "LSTM is not"),
    "gru": (lambda: First(nn.GRU(4, 4)), 4, "layer.weight_hh_l0", "GRU is not a known"),
    "bilinear": (Both, 4, "layer.weight", "Bilinear is not a known layer"),
    "rms": (RMSNorm, 4, "weight", r"\w+\.RMSNorm is not a known layer"),
    "experts": (Experts, 4, "up", "Experts is not a known layer"),
    "weight_norm": (
        lambda: weight_norm(nn.Linear(4, 4)),
        4,
        "parametrizations.weight.original0",
        r"the weight of its Linear is computed \(WeightNorm\) from it",
    ),
    "spectral_norm": (
        lambda: spectral_norm(nn.Linear(4, 4)),
        4,
        "bias",
        r"the weight of its Linear is computed \(SpectralNorm\)",
    ),
    "old spectral_norm": (
        lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
        4,
        "weight_orig",
        r"the weight of its Linear is computed \(SpectralNorm\) from it",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_layers_without_a_block_train_and_are_named(name: str) -> None:
    torch.manual_seed(0)
    make, features, parameter, reason = UNKNOWN[name]
    model = nn.Sequential(nn.Linear(5, 4), make(), nn.Linear(features, 3))
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    # what a bias before a softmax over keys adds has no gradient
    learns(model, lambda: F.cross_entropy(model(x), y))
    for owner, _ in optimizers(model):
        assert re.search(reason, row(owner, f"1.{parameter}"))
        assert owner.engine.block["0"].kind is not None
