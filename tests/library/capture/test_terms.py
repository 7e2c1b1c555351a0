"""Over how many terms a loss is: read from the forward, or asked for by name."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import oracle
from tests.support.construct import construct
from tests.support.oracle import near
from torch import Tensor, nn

import natgrad
from natgrad import KFAC, SPNGD, Every, Polar

COUNT, CLASSES = 8, 3


class Net(nn.Module):
    """Two layers, called with the arguments in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, CLASSES)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))

    def forward(self, *args: Any, x: Tensor | None = None, **_: Any) -> Tensor:
        args = args[0] if len(args) == 1 else args
        return self.logits(find(args) if x is None else x)


def find(tree: Any) -> Tensor:
    """The inputs among other arguments: two dims, the last of them four."""
    if isinstance(tree, Tensor):
        return tree
    leaves = list(tree.values() if isinstance(tree, dict) else tree)
    if isinstance(leaves[0], Tensor) and all(leaf.shape == (4,) for leaf in leaves):
        return torch.stack(leaves)
    found = [leaf if isinstance(leaf, Tensor) else find(leaf) for leaf in leaves]
    return next(x for x in found if x.dim() == 2 and x.shape[1] == 4)


def made() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(COUNT, 4).double()
    return Net().double(), x, torch.randint(CLASSES, (COUNT,))


def captured(
    model: nn.Module,
    run: Callable[[KFAC], object],
    names: tuple[str, ...] = ("body/A", "body/G", "head/A", "head/G"),
    **options: Any,
) -> dict[str, Tensor]:
    model.zero_grad()
    with construct(
        KFAC, model, length=natgrad.Free(), refresh=Every(), **options
    ) as kfac:
        run(kfac)
        kfac.step()
        return {name: kfac.statistic(name) for name in names}


def expected(
    model: nn.Module, x: Tensor, y: Tensor, layers: Any = ("body", "head"), **how: Any
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for layer in layers:
        batch = oracle.examples(model, layer, x, y, **how)
        name = layer.rpartition(".")[2]
        found[f"{name}/A"], found[f"{name}/G"] = oracle.factors(batch)
    return found


def all_near(actual: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert actual.keys() == want.keys()
    for name in want:
        near(actual[name], want[name])


# -- one forward ----------------------------------------------------------------------

CALLS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "a temperature first": lambda net, x: net(torch.ones(1), x),
    "a mask first": lambda net, x: net(torch.ones(100, 100), x),
    "a dict with a mask first": lambda net, x: net({"mask": torch.ones(9, 9), "x": x}),
    "keywords": lambda net, x: net(torch.ones(5), x=x),
    "a list of vectors": lambda net, x: net(list(x)),
    "a number first": lambda net, x: net(torch.tensor(2.0), x),
}


@pytest.mark.parametrize("how", CALLS)
def test_the_number_of_examples_is_that_of_the_output(how: str) -> None:
    model, x, y = made()
    want = expected(model, x, y)

    def run(_: KFAC) -> None:
        F.cross_entropy(CALLS[how](model, x), y).backward()

    all_near(captured(model, run), want)


class Loop(Net):
    """Takes a list of vectors and gives each to its layers alone."""

    def forward(self, rows: list[Tensor]) -> Tensor:
        return torch.stack([self.logits(row) for row in rows])


def test_vectors_that_are_taken_one_by_one() -> None:
    model, x, y = made()
    want = expected(model, x, y)
    loop = Loop().double()
    loop.load_state_dict(model.state_dict())

    def run(_: KFAC) -> None:
        F.cross_entropy(loop(list(x)), y).backward()

    all_near(captured(loop, run), want)


def test_one_vector_without_a_batch_is_one_example() -> None:
    """Of four features, which are not four examples."""
    model, x, y = made()
    want = expected(model, x[:1], y[:1])

    def run(_: KFAC) -> None:
        F.cross_entropy(model(x[0]), y[0]).backward()

    all_near(captured(model, run), want)


class Losing(Net):
    """Returns the loss alone, so that the output says nothing."""

    def forward(self, mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), y)


def test_of_a_model_that_returns_its_loss_the_layers_tell() -> None:
    model, x, y = made()
    losing = Losing().double()
    losing.load_state_dict(model.state_dict())

    def run(_: KFAC) -> None:
        losing(torch.ones(7, 7), x, y).backward()

    all_near(captured(losing, run), expected(model, x, y))


class Rows(Net):
    """Its layers see rows of all examples; the output has a row an example."""

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)


def test_layers_that_see_rows_of_examples() -> None:
    torch.manual_seed(0)
    model, x = Rows().double(), torch.randn(COUNT, 2, 4).double()
    y = torch.randint(CLASSES, (COUNT,))
    want = expected(model, x, y)

    def run(_: KFAC) -> None:
        F.cross_entropy(model(x), y).backward()

    all_near(captured(model, run), want)


class Hidden(Net):
    """Nothing says how many examples there are: rows inside, a loss outside."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x.flatten(0, 1)), y.flatten())


def test_what_cannot_be_told_is_refused_with_the_line_to_write() -> None:
    torch.manual_seed(0)
    model, x = Hidden().double(), torch.randn(3, 5, 4).double()
    y = torch.randint(CLASSES, (3, 5))
    with KFAC(model, length=natgrad.Free()) as kfac:
        with pytest.raises(RuntimeError, match=r"15 of its layers.*set_loss_terms\("):
            model(x, y).backward()
        model.zero_grad()
        kfac.set_loss_terms(15)
        model(x, y).backward()
        kfac.step()
        flat = Net().double()
        flat.load_state_dict(model.state_dict())
        want = expected(flat, x.flatten(0, 1), y.flatten())
        all_near({name: kfac.statistic(name) for name in want}, want)


def test_what_needs_no_number_of_examples_does_not_ask_for_it() -> None:
    torch.manual_seed(0)
    model, x = Hidden().double(), torch.randn(3, 5, 4).double()
    with Polar(model, lr=0.01) as optimizer:
        model(x, torch.randint(CLASSES, (3, 5))).backward()
        optimizer.step()


# -- several forwards under one loss --------------------------------------------------


class Pair(nn.Module):
    """Both of a pair in one forward, for the oracle."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pairs: Tensor) -> Tensor:
        return self.net(pairs[:, 0]) - self.net(pairs[:, 1])


def squared(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.square().sum(1).mean()


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_a_siamese_network(loss: str, accumulation: str) -> None:
    model, x, y = made()
    other = torch.randn(COUNT, 4).double()
    pairs, layers = torch.stack((x, other), 1), ("net.body", "net.head")
    want = expected(Pair(model), pairs, y, layers, criterion=squared)

    def run(_: KFAC) -> None:
        difference = (model(x) - model(other)).square().sum(1)
        with pytest.warns(UserWarning, match=r"2 forwards.* one loss.*8 examples"):
            (difference.sum() if loss == "sum" else difference.mean()).backward()

    all_near(captured(model, run, loss=loss, accumulation=accumulation), want)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_the_steps_of_an_episode_are_examples(loss: str) -> None:
    model, x, y = made()
    want = expected(model, x, y)

    def run(_: KFAC) -> None:
        losses = [
            F.cross_entropy(model(row[None]), label[None])
            for row, label in zip(x, y, strict=True)
        ]
        total = torch.stack(losses)
        with pytest.warns(UserWarning, match="8 forwards.* for 8 examples"):
            (total.sum() if loss == "sum" else total.mean()).backward()

    all_near(captured(model, run, loss=loss), want)


def test_two_losses_of_two_forwards_are_as_their_sum() -> None:
    model, x, y = made()

    def at_once(_: KFAC) -> None:
        first, second = model(x), model(2 * x)
        (F.cross_entropy(first, y) + F.cross_entropy(second, y)).backward()

    def in_turn(_: KFAC) -> None:
        first, second = model(x), model(2 * x)
        F.cross_entropy(first, y).backward()
        F.cross_entropy(second, y).backward()

    with pytest.warns(UserWarning, match="under one loss"):
        all_near(captured(model, in_turn), captured(model, at_once))


def test_forwards_of_micro_batches_are_not_under_one_loss() -> None:
    """Also if each of them has two."""
    model, x, _ = made()
    other = torch.randn(COUNT, 4).double()

    def run(parts: int) -> Callable[[KFAC], None]:
        def backward(_: KFAC) -> None:
            for a, b in zip(x.chunk(parts), other.chunk(parts), strict=True):
                loss = (model(a) - model(b)).square().sum(1).mean()
                (loss / parts).backward()

        return backward

    with pytest.warns(UserWarning, match="under one loss"):
        whole = captured(model, run(1))
    with pytest.warns(UserWarning, match="under one loss"):
        parts = captured(model, run(4))
    all_near(parts, whole)


def test_a_forward_that_is_thrown_away_is_under_no_loss() -> None:
    model, x, y = made()
    want = expected(model, x, y)

    def run(_: KFAC) -> None:
        model(x[:3]).sum().item()
        outputs = model(x)
        model(x[:5])
        F.cross_entropy(outputs, y).backward()

    all_near(captured(model, run), want)


def test_given_terms_are_those_of_the_loss() -> None:
    """And no warning."""
    model, x, y = made()
    other = torch.randn(COUNT, 4).double()
    pairs = torch.stack((x, other), 1)
    layers = ("net.body", "net.head")
    want = expected(Pair(model), pairs, y, layers, criterion=squared)

    def run(kfac: KFAC) -> None:
        kfac.set_loss_terms(COUNT)
        (model(x) - model(other)).square().sum(1).mean().backward()

    all_near(captured(model, run), want)


# -- tokens ---------------------------------------------------------------------------


class Translator(nn.Module):
    """An encoder that sees four times as many positions as the decoder."""

    def __init__(self, tied: bool, returns: str) -> None:
        super().__init__()
        self.returns = returns
        self.encoder = nn.Linear(4, 5)
        self.decoder = nn.Embedding(6, 5)
        self.head = nn.Linear(5, 6, bias=False)
        if tied:
            self.head.weight = self.decoder.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = torch.tanh(self.encoder(source)).mean(1, keepdim=True)
        logits = self.head(torch.tanh(self.decoder(target)) + memory)
        if self.returns == "logits":
            return logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("returns", ["logits", "loss"])
def test_all_layers_have_the_tokens_of_the_loss(tied: bool, returns: str) -> None:
    torch.manual_seed(0)
    model = Translator(tied, returns).double()
    source, target = torch.randn(2, 12, 4).double(), torch.randint(6, (2, 3))
    tokens = target.numel()

    def loss() -> Tensor:
        found = model(source, target)
        if returns == "loss":
            return found
        return F.cross_entropy(found.flatten(0, 1), target.flatten())

    # N times the sum of g g^T over positions, with N the tokens of the loss
    seen: dict[Any, Tensor] = {}

    def keep(module: nn.Module, _: Any, output: Tensor) -> None:
        seen[module] = output

    modules = {"encoder": model.encoder, "decoder": model.decoder}
    handles = [module.register_forward_hook(keep) for module in modules.values()]
    value = loss()
    grads = torch.autograd.grad(value, [seen[m] for m in modules.values()])
    for handle in handles:
        handle.remove()
    rows = {name: g.flatten(0, -2) for name, g in zip(modules, grads, strict=True)}
    want = {f"{name}/G": tokens * (r.T @ r).unsqueeze(0) for name, r in rows.items()}

    def run(_: KFAC) -> None:
        loss().backward()

    all_near(captured(model, run, tuple(want), loss="tokens"), want)


class Enlarged(nn.Module):
    """A map of logits that is made larger after its last layer, as FCN does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(2, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.head(x), scale_factor=2)


def test_pixels_of_an_output_that_was_enlarged() -> None:
    torch.manual_seed(0)
    model, x = Enlarged().double(), torch.randn(2, 2, 3, 3).double()
    y = torch.randint(CLASSES, (2, 6, 6))
    probe = torch.zeros(2, CLASSES, 3, 3, dtype=torch.float64, requires_grad=True)
    logits = F.interpolate(model.head(x) + probe, scale_factor=2)
    (g,) = torch.autograd.grad(F.cross_entropy(logits, y), probe)
    rows = g.movedim(1, -1).flatten(0, -2)

    def run(_: KFAC) -> None:
        F.cross_entropy(model(x), y).backward()

    found = captured(model, run, ("head/G",), loss="tokens")
    near(found["head/G"][0], 2 * 36 * rows.T @ rows)


# -- a parameter's gradient asked for beside the loss ---------------------------------


def probe(model: nn.Module, x: Tensor) -> None:
    """Gradient norms of other data, as a logger may want them."""
    loss = model(100 * x[:3]).square().sum()
    torch.autograd.grad(loss, list(model.parameters()))


def stepped(
    kind: str, run: Callable[[Any, nn.Module], None], model: nn.Module
) -> dict[str, Tensor]:
    if kind == "kfac":
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        owner: Any = KFAC(model, sgd, length=natgrad.Free(), refresh=Every())
    elif kind == "spngd":
        owner = sgd = construct(SPNGD, model, lr=0.1, refresh=Every(), factor_decay=0.5)
    else:
        owner = sgd = construct(Polar, model, lr=0.1, refresh=Every(), subsample=1)
    with owner:
        run(owner, model)
        sgd.step()
        names = [f"{x}/{s}" for x in ("body", "head") for s in "AG"]
        known = owner.engine.statistics.states
        return {name: owner.statistic(name) for name in names if name in known}


@pytest.mark.parametrize("when", ["before", "after", "of the same forward"])
@pytest.mark.parametrize("kind", ["kfac", "spngd", "polar"])
def test_gradients_asked_for_beside_the_loss_do_not_count(kind: str, when: str) -> None:
    model, x, y = made()
    want = expected(model, x, y)

    def run(_: Any, model: nn.Module) -> None:
        if when == "before":
            probe(model, x)
        loss = F.cross_entropy(model(x), y)
        if when == "of the same forward":
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        if when == "after":
            probe(model, x)

    found = stepped(kind, run, model)
    for name, value in found.items():
        near(value, want[name])
    assert "body/A" in found


@pytest.mark.parametrize("kind", ["kfac", "spngd", "polar"])
def test_what_is_ignored_does_not_count(kind: str) -> None:
    """Where all gradients are asked for by name, torch cannot tell which are used."""
    model, x, y = made()
    want = expected(model, x, y)

    def run(owner: Any, model: nn.Module) -> None:
        with owner.ignore():
            probe(model, x)
        params = list(model.parameters())
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), params)
        for p, g in zip(params, grads, strict=True):
            p.grad = g

    for name, value in stepped(kind, run, model).items():
        near(value, want[name])


def test_a_backward_inside_ignore_does_not_count() -> None:
    model, x, y = made()
    want = expected(model, x, y)

    def run(kfac: KFAC) -> None:
        extra = model(3 * x).sum()
        with kfac.ignore():
            extra.backward()
        F.cross_entropy(model(x), y).backward()

    all_near(captured(model, run), want)


def test_forwards_that_were_differentiated_are_part_of_one_loss() -> None:
    """A physics-informed network: derivatives inside, values at the boundary."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    inside = torch.randn(6, 2).double().requires_grad_()
    border = torch.randn(3, 2).double()

    def loss(probes: list[Tensor]) -> Tensor:
        def u(x: Tensor, probe: Tensor) -> Tensor:
            return model[2](model[1](model[0](x) + probe))

        first, second = probes
        (slope,) = torch.autograd.grad(
            u(inside, first).sum(), inside, create_graph=True
        )
        return slope.square().sum() / 9 + u(border, second).square().sum() / 9

    probes = [torch.zeros(n, 4).double().requires_grad_() for n in (6, 3)]
    g = torch.cat(torch.autograd.grad(loss(probes), probes))
    want = 9 * g.T @ g  # nine terms, each nine times its part of the mean's gradient

    def run(kfac: KFAC) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (slope,) = torch.autograd.grad(
                model(inside).sum(), inside, create_graph=True
            )
            total = slope.square().sum() / 9 + model(border).square().sum() / 9
            total.backward()

    near(captured(model, run, ("0/G",))["0/G"], want.unsqueeze(0))
