"""Bad input: an error or a warning that names the value, and nothing is changed."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.toys import (
    backward,
    batch,
    mlp,
    parameters,
    same,
    sgd,
    snapshot,
    train,
)
from torch import Tensor, nn

import natgrad
from natgrad.layers.matrices import Linear

Make = Callable[..., Any]


def kfac(model: nn.Module, **options: Any) -> natgrad.KFAC:
    options.setdefault("length", natgrad.KLClip(lr=0.1))
    return construct(natgrad.KFAC, model, **options)


def spngd(model: nn.Module, groups: Any = None, **options: Any) -> natgrad.SPNGD:
    options.setdefault("lr", 0.1)
    return construct(natgrad.SPNGD, model, groups, **options)


both = pytest.mark.parametrize("make", [kfac, spngd])

# -- options ------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[str, Any, str]] = [
    ("damping", -1, ">= 0"),
    ("damping", math.nan, "finite number >= 0"),
    ("damping", math.inf, "finite number"),
    ("damping", "small", "finite number"),
    ("damping", None, "finite number"),
    ("factor_decay", -0.1, r"in \[0, 1\]"),
    ("factor_decay", 1.1, r"in \[0, 1\]"),
    ("factor_decay", math.nan, r"in \[0, 1\]"),
    ("norm_damping_ratio", 0, "> 0"),
    ("fisher", "exact", "'empirical', 'sampled'"),
    ("loss", "median", "'mean', 'sum', 'tokens'"),
    ("accumulation", "max", "'mean', 'sum'"),
    ("sharing", "both", "'expand', 'reduce'"),
    ("norm", "layer", "'skip', 'unit', 'diag', 'full'"),
    ("strategy", "ring", "spngd.*layer_wise.*factor_wise"),
    ("placement", "random", "round_robin.*longest_first"),
    ("refresh", 10, r"Adaptive\(...\).*Every\(...\)"),
    ("subsample", 0, "integer >= 1, or None"),
    ("lr", -0.1, "> 0"),
    ("lr", 0, "> 0"),
    ("lr", "fast", "> 0"),
    ("lr", math.nan, "> 0"),
]


@both
@pytest.mark.parametrize(("name", "value", "legal"), BAD_OPTIONS)
def test_a_bad_option(make: Make, name: str, value: Any, legal: str) -> None:
    model = mlp()
    pattern = rf"Invalid {name}='?{value}'?\..*{legal}"
    with pytest.raises((ValueError, TypeError), match=pattern):
        make(model, **{name: value})
    assert hooks(model) == 0


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("momentum", 1.0, r"in \[0, 1\)"),
        ("momentum", -0.1, r"in \[0, 1\)"),
        ("weight_decay", -1.0, ">= 0"),
    ],
)
def test_a_bad_option_of_spngd(name: str, value: Any, legal: str) -> None:
    with pytest.raises(ValueError, match=rf"Invalid {name}={value}.*{legal}"):
        spngd(mlp(), **{name: value})


@pytest.mark.parametrize("value", [0, -1e-3, math.nan, "1e-3"])
def test_a_bad_kl_clip(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"Invalid kappa=.*> 0"):
        natgrad.KLClip(kappa=value)


def test_the_kl_clip_needs_a_learning_rate() -> None:
    with pytest.raises(ValueError, match=r"kappa=0.0001.*optimizer, or length="):
        natgrad.KFAC(mlp())
    natgrad.KFAC(mlp(), length=natgrad.Free())


@both
def test_a_damping_schedule_is_checked_at_each_step(make: Make) -> None:
    model = mlp()
    optimizer = make(
        model, damping=lambda step: 1.0 - step, refresh=natgrad.Every(1, 1)
    )
    for step in range(2):
        backward(model, step)
        optimizer.step()
    backward(model, 2)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"damping\(2\)=-1.0.*>= 0"):
        optimizer.step()
    assert same(before, snapshot(model, optimizer))


# -- models -------------------------------------------------------------------------


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


@both
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(), "Sequential has no parameters"),
        (nn.ReLU(), "ReLU has no parameters"),
        (nn.Sequential(nn.PReLU()), "no trainable layer of a known kind.*PReLU"),
        (nn.Bilinear(2, 2, 2), "known kind among Bilinear.*register_layer"),
        (frozen(), "no trainable layer of a known kind among BatchNorm1d, Linear"),
    ],
)
def test_nothing_to_precondition(make: Make, model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(model)
    assert hooks(model) == 0


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    )


@both
def test_skip_names_layers(make: Make) -> None:
    with pytest.raises(ValueError, match=r"skip=\['head'\].*layer names, as 0, 1, 2"):
        make(mlp(), skip=["head", "0"])
    with pytest.raises(TypeError, match=r"skip='0'.*collection of layer names"):
        make(mlp(), skip="0")


def test_skip_takes_whole_modules() -> None:
    model = nn.Sequential(mlp(), nn.Linear(3, 2).double(), nn.Linear(2, 2).double())
    with kfac(model, skip=["0"], norm="unit") as found:
        assert list(found.refreshes()["statistics"]) == ["1/A", "1/G", "2/A", "2/G"]
        assert found.report().count("named in skip") == 6


def test_what_no_group_names_is_left_to_another_optimizer() -> None:
    model = mlp()
    optimizer = spngd(model, [{"params": list(model[0].named_parameters())}])
    before = parameters(model)
    backward(model, 0)
    optimizer.step()
    moved = [
        not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    ]
    assert moved == [True, True, False, False, False, False]
    assert model[3].weight.grad is not None


def test_attention_is_covered_though_it_calls_no_layer() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with kfac(model) as found:
        rows = [x for x in found.report().splitlines() if "self_attn" in x]
        assert len(rows) == 4
        for row in rows:
            assert ("linear" if "out_proj" in row else "in_projection") in row
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is registered that never fires
            model(torch.randn(2, 3, 8)).sum().backward()
            found.step()


@both
def test_a_sparse_embedding_is_left_out(make: Make) -> None:
    embedding = nn.Embedding(5, 4, sparse=True)
    model = nn.Sequential(embedding, nn.Linear(4, 2))
    before = embedding.weight.detach().clone()
    with make(model) as found:
        assert "its gradient is sparse" in found.report()
        model(torch.tensor([1, 2, 2])).sum().backward()
        gradient = embedding.weight.grad
        found.step()
        assert gradient is not None
        if make is kfac:
            assert embedding.weight.grad is gradient
        else:
            moved = before - 0.1 * gradient.to_dense()
            torch.testing.assert_close(embedding.weight.detach(), moved)


@both
def test_a_sparse_gradient_that_is_not_finite(make: Make) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    found = make(model)
    (math.inf * model(torch.tensor([1, 2, 2])).sum()).backward()
    with pytest.warns(UserWarning, match="not finite"):
        found.step()


class Sometimes(nn.Module):
    """Its second layer runs only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)
        self.deep = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.deep else x


@both
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_layer_that_did_not_run_keeps_its_statistics(
    make: Make, decay: float
) -> None:
    torch.manual_seed(0)
    model = Sometimes()
    optimizer = make(model, refresh=natgrad.Every(1, 1), factor_decay=decay)
    backward(model, 0)
    optimizer.step()
    states = optimizer.engine.statistics.states
    before = {name: (s.inverse, s.timing.refreshed) for name, s in states.items()}
    weight = model.second.weight.detach().clone()
    model.deep = False
    backward(model, 1)
    optimizer.step()
    for name, s in states.items():
        unchanged = s.inverse is before[name][0]
        assert unchanged == name.startswith("second")
        assert s.timing.refreshed == before[name][1] + (not unchanged)
    assert torch.equal(weight, model.second.weight)
    assert optimizer.health()["quarantined"] == {}
    model.deep = True
    backward(model, 2)
    optimizer.step()
    assert states["second/G"].timing.refreshed == 2


# -- closing ------------------------------------------------------------------------


@both
def test_a_closed_one_does_not_step(make: Make) -> None:
    model = mlp()
    optimizer = make(model)
    optimizer.close()
    optimizer.close()
    backward(model, 0)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()
    assert same(before, snapshot(model))
    assert hooks(model) == 0


def test_a_closed_kfac_leaves_a_plain_optimizer() -> None:
    model, other = mlp(), mlp()
    optimizer, k = sgd(model)
    with k:
        pass
    plain = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    train(model, optimizer, range(3))
    train(other, plain, range(3))
    assert same(parameters(model), parameters(other))


def test_an_optimizer_carries_one_preconditioner() -> None:
    """A second would overwrite the first one's state; a closed one does not count."""
    model = mlp()
    optimizer, k = sgd(model)
    with pytest.raises(ValueError, match="this SGD already carries a natgrad"):
        natgrad.KFAC(model, optimizer)
    train(model, optimizer, range(2))
    assert optimizer.state_dict()["natgrad"]["step"] == k.engine.step == 2
    k.close()
    assert hooks(model) == 0
    second = natgrad.KFAC(model, optimizer)
    train(model, optimizer, range(2))
    assert second.engine.step == 2


# -- steps --------------------------------------------------------------------------


class Forgetful(nn.Module):
    """Uses one of its layers by its weight, so that the layer's hook never fires."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.bypassed = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.used(x))
        return nn.functional.linear(x, self.bypassed.weight, self.bypassed.bias)


@both
def test_a_hook_that_never_fired(make: Make) -> None:
    torch.manual_seed(0)
    model = Forgetful()
    optimizer = make(model)
    backward(model, 0)
    with pytest.warns(UserWarning, match="no forward and backward of bypassed:"):
        optimizer.step()
    backward(model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_the_warning_of_a_sampled_fisher_says_what_to_call() -> None:
    model = mlp()
    optimizer, _ = sgd(model, fisher="sampled")
    backward(model, 0)
    with pytest.warns(UserWarning, match=r"of 0, 3:.*sampled_backward\(outputs\)"):
        optimizer.step()


def test_a_step_without_a_backward() -> None:
    model = mlp()
    optimizer, _ = sgd(model)
    before = snapshot(model)
    with pytest.warns(UserWarning, match="no forward and backward of 0, 3"):
        optimizer.step()
    assert same(before, snapshot(model))
    assert all(torch.isfinite(x) for x in train(model, optimizer, range(1, 4)))


def adam(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    return optimizer, construct(natgrad.KFAC, model, optimizer, **options)


def natural(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    optimizer = spngd(model, weight_decay=0.1, **options)
    return optimizer, optimizer


@pytest.mark.parametrize("setup", [sgd, adam, natural])
@pytest.mark.parametrize("refresh", [natgrad.Every(1, 1), natgrad.Adaptive()])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(
    setup: Make, refresh: natgrad.Refresh, poison: float
) -> None:
    model = mlp()
    optimizer, k = setup(model, refresh=refresh, factor_decay=0.5)
    train(model, optimizer, range(3))
    before = parameters(model), snapshot(optimizer)
    rhythm = k.refreshes()
    x, y = batch(3)
    model.zero_grad()
    (poison * nn.functional.cross_entropy(model(x), y)).backward()
    with pytest.warns(UserWarning, match="Step 3 is skipped.*not finite.*1 skipped"):
        optimizer.step()
    assert same(before[0], parameters(model))
    assert same(before[1], snapshot(optimizer))
    assert k.refreshes() == rhythm | {"last": {"estimated": (), "inverted": ()}}
    assert k.health()["skipped_steps"] == 1
    assert all(torch.isfinite(x) for x in train(model, optimizer, range(4, 8)))
    nothing: dict[str, int] = {}
    rest = {"quarantined": nothing, "failures": nothing, "grown": nothing}
    assert k.health() == {"skipped_steps": 1} | rest


def test_a_skipped_step_leaves_no_trace_in_the_next_one() -> None:
    model, other = mlp(), mlp()
    model[1] = nn.Identity()  # batch norm's buffers would remember the skipped batch
    other[1] = nn.Identity()
    (optimizer, _), (reference, _) = sgd(model), sgd(other)
    train(model, optimizer, range(2))
    train(other, reference, range(2))
    x, y = batch(2)
    (math.nan * nn.functional.cross_entropy(model(x), y)).backward()
    with pytest.warns(UserWarning, match="skipped"):
        optimizer.step()
    train(model, optimizer, range(3, 6))
    train(other, reference, range(3, 6))
    assert same(parameters(model), parameters(other))


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_statistic_that_is_not_finite_is_quarantined(
    decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer, k = sgd(model, refresh=natgrad.Every(1, 1), factor_decay=decay)
    train(model, optimizer, range(2))
    states = k.engine.statistics.states
    good = {name: s.inverse for name, s in states.items()}
    average = states["3/G"].average
    kept = None if average is None else average.clone()
    moments = Linear.gradient_moments

    def spoiled(self: Linear, module: nn.Module, *args: Any) -> dict[str, Tensor]:
        found = moments(self, module, *args)
        if module is model[3]:
            found["G"][0, 0, 0] = math.inf
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Linear, "gradient_moments", spoiled)
        train(model, optimizer, range(2, 3))
    assert k.health()["quarantined"] == {"3/G": 1}
    assert [n for n, s in states.items() if s.inverse is good[n]] == ["3/G"]
    average = states["3/G"].average
    assert (average is None) == (kept is None)
    assert kept is None or average is None or torch.equal(average, kept)
    assert all(torch.isfinite(x) for x in train(model, optimizer, range(3, 6)))
    assert states["3/G"].inverse is not good["3/G"]


@pytest.mark.parametrize("positional", [True, False])
def test_a_closure_is_run_before_preconditioning(positional: bool) -> None:
    """Lightning calls ``optimizer.step(closure)``."""
    model, other = mlp(), mlp()
    optimizer: Any = sgd(model)[0]
    reference, _ = sgd(other)
    for step in range(4):
        closure = partial(backward, model, step)
        keyword = {} if positional else {"closure": closure}
        loss = optimizer.step(*[closure][:positional], **keyword)
        (expected,) = train(other, reference, range(step, step + 1))
        assert torch.equal(loss, expected)
    assert same(parameters(model), parameters(other))


@pytest.mark.parametrize("likelihood", ["poisson", ""])
def test_an_unknown_likelihood(likelihood: str) -> None:
    model = mlp()
    k = kfac(model, fisher="sampled")
    outputs = model(batch(0)[0])
    with pytest.raises(ValueError, match=f"likelihood='{likelihood}'.*'cross_entropy'"):
        k.sampled_backward(outputs, likelihood)


def test_sampled_backward_needs_a_sampled_fisher() -> None:
    model = mlp()
    k = kfac(model)
    with pytest.raises(RuntimeError, match=r"fisher='sampled'.*fisher='empirical'"):
        k.sampled_backward(model(batch(0)[0]))


def test_an_unknown_statistic() -> None:
    with pytest.raises(KeyError, match=r"Unknown statistic '9/A'.*0/A, 0/G"):
        kfac(mlp()).statistic("9/A")


@pytest.mark.parametrize("bad", ["dense", 3, int])
def test_register_layer_refuses(bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"Invalid kind=.*LayerKind"):
        natgrad.register_layer(nn.Bilinear, bad)


@pytest.mark.parametrize("bad", [0.0, -0.5, 1.5])
def test_hybrid_refuses(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"fraction={bad}.*\(0, 1\]"):
        natgrad.hybrid(bad)


@pytest.mark.parametrize(
    "option",
    [
        {"lr": 0.1},
        {"momentum": 0.5},
        {"weight_decay": 0.1},
        {"average": natgrad.AverageGradients()},
        {"decay": natgrad.Decoupled()},
    ],
    ids=lambda option: next(iter(option)),
)
def test_kfac_refuses_what_is_its_host_optimizers(option: dict[str, Any]) -> None:
    """It would have no effect."""
    (name,) = option
    model = mlp()
    with pytest.raises(ValueError, match=f"Invalid {name}=.* of KFAC.*no effect"):
        sgd(model, **option)
    assert not model[0]._forward_hooks
