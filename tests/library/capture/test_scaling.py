"""Statistics mean the same whatever the loss averages over and however it is scaled."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import oracle
from tests.support.construct import construct
from tests.support.oracle import near
from torch import Tensor, nn

import natgrad
from natgrad import KFAC, Every

CLASSES = 3


class Network(nn.Module):
    """A convolution, norms of both sorts, and a linear layer; no batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.batch = nn.BatchNorm2d(2).eval()
        self.group = nn.GroupNorm(1, 2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.group(self.batch(self.conv(x))))
        return self.head(x.flatten(1))

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        self.batch.eval()
        return self


LAYERS = ("conv", "batch", "group", "head")
STATISTICS = ("conv/A", "conv/G", "batch/unit", "group/unit", "head/A", "head/G")


def network() -> Network:
    torch.manual_seed(0)
    return Network().double()


def images(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 3, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def kfac_of(model: nn.Module, **options: Any) -> KFAC:
    options = {"length": natgrad.Free(), "norm": "unit", "refresh": Every()} | options
    return construct(KFAC, model, **options)


def brute_force(
    model: nn.Module, x: Tensor, y: Tensor, layers: Sequence[str] = LAYERS
) -> dict[str, Tensor]:
    """Statistics by name, from a loop over examples."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        batch = oracle.examples(model, layer, x, y)
        if isinstance(model.get_submodule(layer), oracle.NORMS):
            found[f"{layer}/unit"] = oracle.norm_statistic(batch, "unit")
        else:
            found[f"{layer}/A"], found[f"{layer}/G"] = oracle.factors(batch)
    return found


def captured(
    model: nn.Module,
    run: Callable[[KFAC], object],
    names: tuple[str, ...] = STATISTICS,
    **options: Any,
) -> dict[str, Tensor]:
    """The statistics after ``run`` has done the backward passes of one step."""
    model.zero_grad()
    with kfac_of(model, **options) as kfac:
        run(kfac)
        kfac.step()
        return {name: kfac.statistic(name) for name in names}


def all_near(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        near(actual[name], expected[name])


@settings(deadline=None, max_examples=10)
@given(count=st.integers(1, 64), seed=st.integers(0, 100))
def test_any_batch_size(count: int, seed: int) -> None:
    model = network()
    x, y = images(count, seed)
    want = brute_force(model, x, y, ("head", "group"))

    def run(_: KFAC) -> None:
        F.cross_entropy(model(x), y).backward()

    all_near(captured(model, run, tuple(want)), want)


@pytest.mark.parametrize("count", [1, 5])
def test_a_sum_over_examples(count: int) -> None:
    model = network()
    x, y = images(count)
    want = brute_force(model, x, y)

    def run(_: KFAC) -> None:
        F.cross_entropy(model(x), y, reduction="sum").backward()

    all_near(captured(model, run, loss="sum"), want)


SPLITS = {"one": [12], "even": [4, 4, 4], "uneven": [5, 1, 4, 2], "single": [1] * 12}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_micro_batches(split: list[int], accumulation: str, loss: str) -> None:
    """Each example's own gradient counts, whatever micro-batch it came in."""
    model = network()
    x, y = images(12)
    want = brute_force(model, x, y)
    divisor = len(split) if accumulation == "mean" else 1

    def run(_: KFAC) -> None:
        for xs, ys in zip(x.split(split), y.split(split), strict=True):
            part = F.cross_entropy(model(xs), ys, reduction=loss)
            (part / divisor).backward()

    all_near(captured(model, run, loss=loss, accumulation=accumulation), want)


@settings(deadline=None, max_examples=8)
@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=4))
def test_any_split_is_the_whole_batch(sizes: list[int]) -> None:
    model = network()
    x, y = images(sum(sizes))

    def split(_: KFAC) -> None:
        for xs, ys in zip(x.split(sizes), y.split(sizes), strict=True):
            (F.cross_entropy(model(xs), ys) / len(sizes)).backward()

    whole = captured(model, lambda _: F.cross_entropy(model(x), y).backward())
    all_near(captured(model, split), whole)


def test_batches_of_varying_size_weigh_alike_in_the_average() -> None:
    model = network()
    batches = [images(n, seed=n) for n in (8, 3, 1)]
    wants = [brute_force(model, x, y) for x, y in batches]
    with kfac_of(model, factor_decay=0.75) as kfac:
        for x, y in batches:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            kfac.step()
        for name in STATISTICS:
            first, second, third = (want[name] for want in wants)
            average = 0.75 * (0.75 * first + 0.25 * second) + 0.25 * third
            near(kfac.statistic(name), average)


class Tokens(nn.Module):
    """Acts on each token alone, so that a token is as good as an example."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.embedding(x))))


TOKEN_STATISTICS = ("embedding/A", "embedding/G", "norm/unit", "head/A", "head/G")


def token_batch() -> tuple[Tokens, Tensor, Tensor]:
    torch.manual_seed(0)
    return Tokens().double(), torch.randint(6, (4, 5)), torch.randint(CLASSES, (4, 5))


def token_brute_force(model: Tokens, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Every token as an example of its own."""
    found = brute_force(model, x, y, ("embedding", "norm", "head"))
    found["embedding/A"] = found["embedding/A"].diagonal(dim1=1, dim2=2)
    return found


def test_a_mean_over_tokens() -> None:
    model, x, y = token_batch()
    want = token_brute_force(model, x.flatten(), y.flatten())

    def run(_: KFAC) -> None:
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

    all_near(captured(model, run, TOKEN_STATISTICS, loss="tokens"), want)


def test_a_mean_over_tokens_in_micro_batches() -> None:
    model, x, y = token_batch()
    want = token_brute_force(model, x.flatten(), y.flatten())

    def run(_: KFAC) -> None:
        for i in range(4):
            logits = model(x[i : i + 1]).flatten(0, 1)
            (F.cross_entropy(logits, y[i]) / 4).backward()

    all_near(captured(model, run, TOKEN_STATISTICS, loss="tokens"), want)


@pytest.mark.parametrize("before", [True, False])
def test_masked_tokens_are_no_terms(before: bool) -> None:
    """`set_loss_terms` may come before the forward or before the backward."""
    model, x, y = token_batch()
    y[0, 1:] = y[2, 3:] = -100
    kept = y.flatten() >= 0
    want = token_brute_force(model, x.flatten()[kept], y.flatten()[kept])

    def run(kfac: KFAC) -> None:
        if before:
            kfac.set_loss_terms(int(kept.sum()))
        logits = model(x).flatten(0, 1)
        if not before:
            kfac.set_loss_terms(int(kept.sum()))
        F.cross_entropy(logits, y.flatten(), ignore_index=-100).backward()

    found = captured(model, run, TOKEN_STATISTICS, loss="tokens")
    for name in ("embedding/G", "norm/unit", "head/G"):
        near(found[name], want[name])


def test_loss_terms_hold_for_one_step() -> None:
    model, x, y = token_batch()
    with kfac_of(model, loss="tokens", factor_decay=0.5) as kfac:
        for terms in (7, None):
            if terms:
                kfac.set_loss_terms(terms)
            model.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            kfac.step()
        g = oracle.factors(oracle.examples(model, "head", x.flatten(), y.flatten()))[1]
        # ghat is 7 / 20 of what it is over all tokens, and there are 7 terms.
        first = g * (7 / 20) ** 2 * 20 / 7
        near(kfac.statistic("head/G"), 0.5 * first + 0.5 * g)


def test_a_skipped_step_does_not_forget_loss_terms() -> None:
    model, x, y = token_batch()

    def backward() -> None:
        model.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

    def run(kfac: KFAC) -> None:
        backward()
        model.zero_grad()
        kfac.set_loss_terms(7)
        backward()

    def alone(kfac: KFAC) -> None:
        kfac.set_loss_terms(7)
        backward()

    want = captured(model, alone, TOKEN_STATISTICS, loss="tokens")
    all_near(captured(model, run, TOKEN_STATISTICS, loss="tokens"), want)


def scaler_of(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**-4])
def test_a_grad_scaler_is_undone(scale: float) -> None:
    model = network()
    x, y = images(6)
    want = brute_force(model, x, y)
    scaler = scaler_of(scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {
        "norm": "unit",
        "refresh": Every(),
        "length": natgrad.Free(),
    }
    with construct(KFAC, model, optimizer, grad_scaler=scaler, **options) as kfac:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        all_near({name: kfac.statistic(name) for name in STATISTICS}, want)


def test_a_scaler_does_not_change_the_step() -> None:
    weights = []
    for scale in (None, 2.0**12):
        model = network()
        x, y = images(6)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale or 1.0, enabled=scale is not None
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with KFAC(model, optimizer, grad_scaler=scaler, refresh=Every()):
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
        weights.append([p.detach().clone() for p in model.parameters()])
    for plain, scaled in zip(*weights, strict=True):
        near(scaled, plain)


def test_an_overflow_that_skips_the_step_leaves_no_trace() -> None:
    model = network()
    x, y = images(6)
    want = brute_force(model, x, y)
    scaler = scaler_of(2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with KFAC(
        model, optimizer, grad_scaler=scaler, norm="unit", length=natgrad.Free()
    ) as kfac:
        # Some layers overflow, those above them do not.
        model.conv.weight.register_hook(lambda g: g * float("inf"))
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        for p, old in zip(model.parameters(), before, strict=True):
            near(p, old, rtol=0, atol=0)
        model.conv.weight._backward_hooks.clear()  # pyright: ignore
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        all_near({name: kfac.statistic(name) for name in STATISTICS}, want)


def test_autocast_keeps_float32_statistics() -> None:
    model = network()
    x, y = images(16)
    want = brute_force(model, x, y)
    half = network().float()

    def run(_: KFAC) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(half(x.float()), y)
        loss.backward()

    for name, value in captured(half, run).items():
        assert value.dtype == torch.float32
        scale = want[name].abs().max()
        error = (value - want[name]).abs().max() / scale
        # bfloat16 rounds activations and gradients at 2^-9; sums are in float32.
        assert error < 2e-2, name


def test_inputs_in_autocast_are_summed_in_float32() -> None:
    """A bfloat16 product would lose what float32 keeps of a float32 input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, CLASSES))
    x, y = torch.randn(64, 4) + 3, torch.randint(CLASSES, (64,))
    rows = torch.cat([x.double(), torch.ones(64, 1).double()], 1)

    def run(_: KFAC) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    a = captured(model, run, ("0/A",))["0/A"][0]
    near(a.double(), rows.T @ rows / 64, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_keeps_float32_statistics(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tokens().to(dtype)
    x = torch.randint(3, (700, 1))
    y = torch.randint(CLASSES, (700,))

    def run(_: KFAC) -> None:
        F.cross_entropy(model(x)[:, 0].float(), y).backward()

    found = captured(model, run, TOKEN_STATISTICS)
    assert {value.dtype for value in found.values()} == {torch.float32}
    # Counts above 256 are not exact in bfloat16.
    counts = torch.bincount(x.flatten(), minlength=6).float().unsqueeze(0)
    near(found["embedding/A"], counts / 700, rtol=1e-6)


# -- the Fisher of labels drawn from the model ----------------------------------------


def sampled(
    model: nn.Module,
    run: Callable[[KFAC], object],
    names: tuple[str, ...] = STATISTICS,
    **options: Any,
) -> dict[str, Tensor]:
    return captured(model, run, names, fisher="sampled", **options)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_given_labels_replace_the_draw(loss: str) -> None:
    model = network()
    x, y = images(6)
    labels = images(6, seed=5)[1]
    want = brute_force(model, x, labels)

    def run(kfac: KFAC) -> None:
        outputs = model(x)
        kfac.sampled_backward(outputs, targets=labels)
        F.cross_entropy(outputs, y, reduction=loss).backward()

    all_near(sampled(model, run, loss=loss), want)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_given_targets_of_a_squared_error(loss: str) -> None:
    model = network()
    x, y = images(6)[0], torch.randn(6, CLASSES).double()
    targets = torch.randn(6, CLASSES).double()
    a, g = oracle.factors(oracle.examples(model, "conv", x, targets, F.mse_loss))

    def run(kfac: KFAC) -> None:
        outputs = model(x)
        kfac.sampled_backward(outputs, "mse", targets=targets)
        F.mse_loss(outputs, y).backward()

    all_near(
        sampled(model, run, ("conv/A", "conv/G"), loss=loss), {"conv/A": a, "conv/G": g}
    )


def test_sampling_leaves_gradients_alone() -> None:
    model = network()
    x, y = images(6)
    with kfac_of(model, fisher="sampled") as kfac:
        outputs = model(x)
        kfac.sampled_backward(outputs)
        assert all(p.grad is None for p in model.parameters())
        F.cross_entropy(outputs, y).backward()
        plain = network()
        F.cross_entropy(plain(x), y).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert q.grad is not None
            near(p.grad, q.grad, rtol=0, atol=0)


@pytest.mark.parametrize("split", [[6], [2, 2, 2], [1, 3, 2]], ids=str)
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_sampled_micro_batches(split: list[int], accumulation: str) -> None:
    model = network()
    x, y = images(6)
    labels = images(6, seed=5)[1]
    want = brute_force(model, x, labels)
    divisor = len(split) if accumulation == "mean" else 1

    def run(kfac: KFAC) -> None:
        parts = (x.split(split), y.split(split), labels.split(split))
        for xs, ys, drawn in zip(*parts, strict=True):
            outputs = model(xs)
            kfac.sampled_backward(outputs, targets=drawn)
            (F.cross_entropy(outputs, ys) / divisor).backward()

    all_near(sampled(model, run, accumulation=accumulation), want)


def test_the_sampled_loss_has_no_amp_scale() -> None:
    model = network()
    x, y = images(6)
    labels = images(6, seed=5)[1]
    want = brute_force(model, x, labels)
    scaler = scaler_of(2.0**10)

    def run(kfac: KFAC) -> None:
        outputs = model(x)
        kfac.sampled_backward(outputs, targets=labels)
        scaler.scale(F.cross_entropy(outputs, y)).backward()

    all_near(sampled(model, run, grad_scaler=scaler), want)


BATCHES, COPIES = 25, 400


class Tiny(nn.Module):
    """Logits from a linear layer, at one position or at several."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def mean_of_draws(
    model: nn.Module,
    x: Tensor,
    likelihood: str,
    arrange: Callable[[Tensor], Tensor] = lambda outputs: outputs,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The mean of G over many draws, and the standard error of each entry."""
    draws: list[Tensor] = []
    torch.manual_seed(3)
    copies = x.repeat(COPIES, *[1] * (x.dim() - 1))
    with kfac_of(model, fisher="sampled", **options) as kfac:
        for _ in range(BATCHES):
            kfac.sampled_backward(arrange(model(copies)), likelihood)
            seen = kfac.engine.capture.take()
            draws.append(seen.sums["head/G"][0] / seen.count("head/G"))
    stacked = torch.stack(draws)
    return stacked.mean(0), stacked.std(0) / BATCHES**0.5


def assert_in_expectation(mean: Tensor, error: Tensor, exact: Tensor) -> None:
    """Within five standard errors, and those are small enough to tell."""
    assert float(error.max() / exact.abs().max()) < 0.05
    assert ((mean - exact).abs() <= 5 * error + 1e-12).all(), (mean, exact, error)


def tiny() -> tuple[Tiny, Tensor]:
    torch.manual_seed(0)
    return Tiny().double(), torch.randn(3, 2).double()


def test_drawn_classes_have_the_model_s_fisher() -> None:
    """G = mean of diag(p) - p p^T: all classes weighed with their probability."""
    model, x = tiny()
    probabilities = torch.softmax(model(x), 1).detach()
    exact = torch.zeros(CLASSES, CLASSES).double()
    for p in probabilities:
        for c in range(CLASSES):
            g = p - F.one_hot(torch.tensor(c), CLASSES)
            exact += p[c] * torch.outer(g, g) / len(x)
    mean, error = mean_of_draws(model, x, "cross_entropy")
    assert_in_expectation(mean, error, exact)


def test_drawn_targets_have_the_gauss_newton_matrix_of_mse() -> None:
    """An example's loss is a mean over d outputs: its Hessian is (2 / d) I."""
    model, x = tiny()
    exact = 2 / CLASSES * torch.eye(CLASSES).double()
    mean, error = mean_of_draws(model, x, "mse")
    assert_in_expectation(mean, error, exact)


def test_drawn_targets_of_tokens_have_each_token_s_gauss_newton_matrix() -> None:
    """With a mean over tokens, d is the outputs of one token."""
    model, _ = tiny()
    x = torch.randn(3, 4, 2).double()
    exact = 2 / CLASSES * torch.eye(CLASSES).double()
    mean, error = mean_of_draws(model, x, "mse", loss="tokens")
    assert_in_expectation(mean, error, exact)


def test_drawn_classes_of_tokens() -> None:
    """Classes are in dim 1, as for torch's cross_entropy."""
    model, _ = tiny()
    x = torch.randn(2, 2, 2).double()
    p = torch.softmax(model(x), 2).detach().reshape(-1, CLASSES)
    exact = (torch.diag_embed(p) - oracle.outer(p)).mean(0)
    mean, error = mean_of_draws(
        model, x, "cross_entropy", lambda y: y.movedim(2, 1), loss="tokens"
    )
    assert_in_expectation(mean, error, exact)
