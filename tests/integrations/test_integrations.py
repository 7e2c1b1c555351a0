"""Under torch.compile, DDP and trainers, KFAC does what it does in a plain loop."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.toys import backward, batch, mlp, parameters, train
from tests.support.world import run_world
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import natgrad
from natgrad.capture import hooks

REFRESH = natgrad.Every(statistics=2, inverses=4)
STEPS = 6


def made(model: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer, construct(
        natgrad.KFAC, model, optimizer, refresh=REFRESH, **options
    )


def plain(steps: int = STEPS, micro: int = 1, **options: Any) -> list[Tensor]:
    """Parameters after a loop by hand, from which every trainer must not differ."""
    model = mlp()
    optimizer, kfac = made(model, **options)
    with kfac:
        for step in range(steps):
            optimizer.zero_grad()
            for i in range(micro):
                x, y = batch(step * micro + i)
                (F.cross_entropy(model(x), y) / micro).backward()
            optimizer.step()
    return parameters(model)


def close(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)


def batches(count: int) -> TensorDataset:
    """The toys' batches one after the other, for a loader that does not shuffle."""
    pairs = [batch(i) for i in range(count)]
    return TensorDataset(*(torch.cat(part) for part in zip(*pairs, strict=True)))


# -- torch.compile ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nobody_else_watches() -> None:
    """Optimizers that other tests never closed keep compiled code from being used."""
    for other in [*hooks._STANCE.watched]:
        other.watch(False)


@pytest.fixture
def graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that the backend `counting` was given."""
    seen: list[torch.fx.GraphModule] = []
    gc.collect()  # models of other tests that are still watched
    torch.compiler.reset()
    yield seen
    torch.compiler.reset()


def counting(seen: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        seen.append(graph)
        return graph.forward

    return backend


@pytest.mark.parametrize(
    ("order", "full"),
    [
        ("before", False),
        ("before", True),
        ("around", False),
        ("around", True),
        ("after a call", False),
        ("in place", False),
    ],
)
def test_a_compiled_model(
    order: str, full: bool, graphs: list[torch.fx.GraphModule]
) -> None:
    model = mlp()
    run: nn.Module = model
    options: Any = {"backend": counting(graphs), "fullgraph": full}
    if order != "before":
        run = torch.compile(model, **options)  # pyright: ignore
    if order == "after a call":
        backward(run, 0)
    if order == "in place":
        model.compile(backend=counting(graphs))
        run = model
    source = copy.deepcopy(mlp().state_dict())
    model.load_state_dict(source)
    optimizer, kfac = made(run if order == "around" else model)
    if order == "before":
        run = torch.compile(model, **options)  # pyright: ignore
    with kfac:
        train(run, optimizer, range(STEPS))
        assert list(kfac.engine.block) == ["0", "1.weight", "1.bias", "3"]
    assert close(parameters(model), plain())
    # one graph, of the whole model: steps with nothing due, which run compiled
    assert len(graphs) == 1


def test_a_model_that_is_watched_runs_as_written_only_while_it_is(
    graphs: list[torch.fx.GraphModule],
) -> None:
    doubled = torch.compile(lambda x: x * 2, backend=counting(graphs))
    _, kfac = made(mlp())
    doubled(torch.ones(2))
    assert not graphs
    kfac.close()
    doubled(torch.ones(2))
    assert len(graphs) == 1


def test_a_stance_that_a_user_has_set_comes_back(
    graphs: list[torch.fx.GraphModule],
) -> None:
    doubled = torch.compile(lambda x: x * 2, backend=counting(graphs))
    with torch.compiler.set_stance("force_eager"):
        _, kfac = made(mlp())
        kfac.close()
        doubled(torch.ones(2))
    assert not graphs


def test_a_compiled_optimizer_step(graphs: list[torch.fx.GraphModule]) -> None:
    model = mlp()
    optimizer, kfac = made(model)
    step = torch.compile(optimizer.step, backend=counting(graphs))
    with kfac:
        for i in range(STEPS):
            backward(model, i)
            step()
    assert close(parameters(model), plain())
    assert graphs


# -- several ranks ------------------------------------------------------------------


def wrapped(_: int, late: bool, micro: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Both ranks see the same batch, so that their mean is what one would see."""
    net = mlp()
    optimizer, kfac = made(net) if late else (None, None)
    model = DistributedDataParallel(net)
    if not late:
        optimizer, kfac = made(model)
    assert optimizer is not None
    assert kfac is not None
    for step in range(3):
        optimizer.zero_grad()
        for i in range(micro):
            with model.no_sync() if i < micro - 1 else nullcontext():
                x, y = batch(step * micro + i)
                (F.cross_entropy(model(x), y) / micro).backward()
        optimizer.step()
    moved = kfac.traffic()["total"]
    kfac.close()
    return parameters(net), moved


@pytest.mark.processes
@pytest.mark.parametrize(("late", "micro"), [(False, 2), (True, 1), (True, 2)])
def test_a_model_wrapped_before_or_after(late: bool, micro: int) -> None:
    expected = plain(3, micro)
    for found, moved in run_world(2, wrapped, late, micro):
        assert close(found, expected)
        assert moved["reduce_statistics"]["sent"] > 0
        # DDP has moved the gradients already
        assert moved.get("reduce_gradients", {}).get("sent", 0) == 0


# -- layers that freeze and thaw ----------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def method(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "spngd":
        return natgrad.SPNGD(model, lr=0.05, refresh=natgrad.Every(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    natgrad.KFAC(model, optimizer, refresh=natgrad.Every(1, 1))
    return optimizer


def moves(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes the first layer."""
    weight = model.get_parameter("0.weight")
    before = weight.detach().clone()
    optimizer.zero_grad()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return not torch.equal(before, weight)


@pytest.mark.parametrize("kind", ["kfac", "spngd"])
def test_a_layer_can_be_frozen_and_thawed(kind: str) -> None:
    model = net()
    optimizer = method(kind, model)
    assert moves(model, optimizer)
    model[0].requires_grad_(False)
    assert not moves(model, optimizer)
    model[0].requires_grad_(True)
    assert moves(model, optimizer)


def test_a_layer_that_was_frozen_at_first_has_a_plain_gradient() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = method("kfac", model)
    model[0].requires_grad_(True)
    assert moves(model, optimizer)


@pytest.mark.parametrize("kind", ["kfac", "spngd"])
def test_a_bias_alone_cannot_be_frozen(kind: str) -> None:
    model = net()
    optimizer = method(kind, model)
    model[0].bias.requires_grad_(False)  # pyright: ignore
    with pytest.raises(RuntimeError, match="The bias of 0 was frozen or unfrozen"):
        moves(model, optimizer)
