"""What must hold of any correct K-FAC, and of hooks that are nobody's business."""

import copy
import gc
import weakref
from collections.abc import Callable
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
from torch.utils.checkpoint import checkpoint

import natgrad
from natgrad import KFAC, SPNGD, Every
from natgrad.layers.embedding import Embedding
from natgrad.layers.matrices import Conv, Linear
from natgrad.math.statistics import enough_examples

# -- properties of the step ------------------------------------------------------------


def least_squares(
    rows: int, inputs: int, outputs: int, seed: int
) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Linear(inputs, outputs).double()
    x = torch.randn(rows, inputs).double() + 0.5
    return model, x, torch.randn(rows, outputs).double()


def signs(rows: int, outputs: int) -> Tensor:
    """+-1 with the mean of s s^T exactly I: rows of a Hadamard matrix, repeated."""
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < outputs:
        top = torch.cat([hadamard, hadamard], 1)
        hadamard = torch.cat([top, torch.cat([hadamard, -hadamard], 1)])
    return hadamard[:, :outputs].repeat(rows // len(hadamard), 1)


@settings(deadline=None, max_examples=8)
@given(
    inputs=st.integers(1, 5),
    outputs=st.integers(1, 4),
    style=st.sampled_from(["eigen", "factored"]),
    seed=st.integers(0, 1000),
)
def test_one_undamped_step_solves_least_squares(
    inputs: int, outputs: int, style: Any, seed: int
) -> None:
    """With targets whose G is the Gauss-Newton factor (2 / d) I of the loss.

    Such targets lie sqrt(d / 2) above or below the outputs, as a Gaussian of the
    likelihood's variance does on average.
    """
    model, x, y = least_squares(16, inputs, outputs, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options: dict[str, Any] = {
        "damping": 0.0,
        "rule": natgrad.Kronecker(style=style),
        "length": natgrad.Free(),
    }
    with construct(KFAC, model, optimizer, fisher="sampled", **options) as kfac:
        predicted = model(x)
        drawn = predicted.detach() + (outputs / 2) ** 0.5 * signs(16, outputs)
        kfac.sampled_backward(predicted, "mse", targets=drawn)
        F.mse_loss(predicted, y).backward()
        optimizer.step()
        g = kfac.statistic("model/G")[0]
        near(g, 2 / outputs * torch.eye(outputs).double())
    bordered = torch.cat([x, torch.ones(16, 1).double()], 1)
    solution = torch.linalg.lstsq(bordered, y).solution
    near(model.weight.detach(), solution[:-1].T, rtol=1e-6, atol=1e-8)
    near(model.bias.detach(), solution[-1], rtol=1e-6, atol=1e-8)


class Affine(nn.Module):
    """A network whose inputs are a linear map of others."""

    def __init__(self, net: nn.Module, matrix: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.net, self.matrix, self.shift = net, matrix, shift

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x @ self.matrix.T + self.shift)


def regression(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 3), nn.Tanh(), nn.Linear(3, 2)).double()


@pytest.mark.parametrize("style", ["eigen", "factored"])
def test_the_step_does_not_see_an_affine_change_of_inputs(style: Any) -> None:
    """Undamped, the same function results whatever units the inputs are in."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 3).double(), torch.randn(32, 2).double()
    matrix, shift = torch.randn(3, 3).double(), torch.randn(3).double()
    original = regression(3)
    changed = regression(3)
    changed.load_state_dict(original.state_dict())
    # The changed network computes the same function of the changed inputs.
    inverse = torch.linalg.inv(matrix)
    first, twin = original[0], changed[0]
    assert isinstance(first, nn.Linear)
    assert isinstance(twin, nn.Linear)
    with torch.no_grad():
        twin.weight.copy_(first.weight @ inverse)
        twin.bias.copy_(first.bias - first.weight @ inverse @ shift)
    other = Affine(changed, matrix, shift)
    near(other(x), original(x), rtol=1e-9, atol=1e-11)
    for model in (original, other):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        options: dict[str, Any] = {
            "rule": natgrad.Kronecker(style=style),
            "length": natgrad.Free(),
        }
        with construct(KFAC, model, optimizer, damping=0.0, refresh=Every(), **options):
            for _ in range(2):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
    near(other(x), original(x), rtol=1e-6, atol=1e-8)
    assert not torch.allclose(twin.weight, first.weight)


class Small(nn.Module):
    """One layer of each sort, with an in-place ReLU after each if asked."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=inplace)
        self.second = nn.Conv2d(2, 2, 2, stride=2)
        self.group = nn.GroupNorm(1, 2)
        self.hidden = nn.Linear(8, 4)
        self.layer_norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def features(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.relu(self.conv(x))))
        return self.relu(self.group(self.relu(self.second(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.hidden(self.features(x).flatten(1)))
        return self.head(self.relu(self.layer_norm(x)))


NAMES = (
    *(f"{n}/{k}" for n in ("conv", "second", "hidden", "head") for k in "AG"),
    *(f"{n}/unit" for n in ("norm", "group", "layer_norm")),
)


def small(**options: Any) -> tuple[Small, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Small(**options).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, torch.randn(5, 1, 4, 4).double(), torch.randint(3, (5,))


def kfac_of(model: nn.Module, **options: Any) -> KFAC:
    options = {"length": natgrad.Free(), "norm": "unit", "refresh": Every()} | options
    return construct(KFAC, model, **options)


def captured(
    model: nn.Module, run: Callable[[KFAC], object], **options: Any
) -> dict[str, Tensor]:
    model.zero_grad()
    with kfac_of(model, **options) as kfac:
        run(kfac)
        kfac.step()
        return {name: kfac.statistic(name) for name in NAMES}


def reference() -> dict[str, Tensor]:
    model, x, y = small()
    return captured(model, lambda _: F.cross_entropy(model(x), y).backward())


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        near(actual[name], expected[name])


@settings(deadline=None, max_examples=6)
@given(parts=st.sampled_from([1, 2, 3, 4, 6, 12]), kind=st.sampled_from(["k", "s"]))
def test_a_step_does_not_depend_on_the_split_into_micro_batches(
    parts: int, kind: str
) -> None:
    weights: list[list[Tensor]] = []
    for k in (1, parts):
        model, _, _ = small()
        model.norm.eval()
        x, y = torch.randn(12, 1, 4, 4).double(), torch.randint(3, (12,))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "k":
            KFAC(model, optimizer, norm="unit", refresh=Every())
        else:
            optimizer = SPNGD(model, lr=0.01, refresh=Every())
        for _ in range(2):
            optimizer.zero_grad()
            for xs, ys in zip(x.chunk(k), y.chunk(k), strict=True):
                (F.cross_entropy(model(xs), ys) / k).backward()
            optimizer.step()
        weights.append([p.detach() for p in model.parameters()])
    for whole, split in zip(*weights, strict=True):
        near(split, whole, rtol=1e-8, atol=1e-10)


# -- hooks -----------------------------------------------------------------------------


def test_in_place_relu_after_every_layer() -> None:
    model, x, y = small(inplace=True)
    run: Callable[[KFAC], object] = lambda _: F.cross_entropy(model(x), y).backward()  # noqa: E731
    same(captured(model, run), reference())


def test_channels_last() -> None:
    model, x, y = small()
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    x = x.to(memory_format=torch.channels_last)
    same(
        captured(model, lambda _: F.cross_entropy(model(x), y).backward()), reference()
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    model, x, y = small()
    plain, x_needs = model.features, x.clone().requires_grad_()

    def recomputed(x: Tensor) -> Tensor:
        return checkpoint(plain, x, use_reentrant=reentrant)  # pyright: ignore

    model.features = recomputed
    same(
        captured(model, lambda _: F.cross_entropy(model(x_needs), y).backward()),
        reference(),
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_micro_batches(reentrant: bool) -> None:
    want, found = [], []
    for recompute in (False, True):
        model, x, y = small()
        model.norm.eval()
        plain = model.features
        if recompute:
            model.features = lambda images, plain=plain: checkpoint(  # pyright: ignore
                plain, images, use_reentrant=reentrant
            )
        model.zero_grad()
        with kfac_of(model) as kfac:
            for xs, ys in zip(x.split(2), y.split(2), strict=True):
                F.cross_entropy(model(xs.requires_grad_()), ys).div(3).backward()
            kfac.step()
            (found if recompute else want).extend(map(kfac.statistic, NAMES))
    for a, b in zip(found, want, strict=True):
        near(a, b)


def test_forwards_without_a_backward_count_for_nothing() -> None:
    model, x, y = small()
    other = torch.randn_like(x)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0

    def run(_: KFAC) -> None:
        with torch.no_grad():
            model(other)
        model.eval()
        F.cross_entropy(model(other), y).backward()
        model.zero_grad()
        model.train()
        model(other)
        loss = F.cross_entropy(model(x), y)
        with torch.inference_mode():
            model(other)
        with torch.no_grad():
            model(other)
        loss.backward()

    same(captured(model, run), reference())


def test_a_backward_in_evaluation_mode_leaves_micro_batches_alone() -> None:
    """Its gradient is the caller's; its examples are no part of the statistics."""
    model, x, y = small()

    def run(_: KFAC) -> None:
        F.cross_entropy(model(x), y).backward()
        model.eval()
        F.cross_entropy(model(x[:2]), y[:2]).backward()
        model.train()

    same(captured(model, run), reference())


def test_a_gradient_penalty_is_part_of_the_loss() -> None:
    """Its inner gradient is not: ghat is N times the whole loss's gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(5, 3).double().requires_grad_(), torch.randint(3, (5,))

    def loss(probe: Tensor | float = 0.0) -> Tensor:
        outputs = model[1](model[0](x) + probe)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return F.cross_entropy(model[2](outputs), y) + slope.square().sum(1).mean()

    probe = torch.zeros(5, 4, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(loss(probe), probe)
    want = sum(torch.outer(r, r) for r in 5 * g) / 5
    with kfac_of(model) as kfac:
        loss().backward()
        kfac.step()
        near(kfac.statistic("0/G"), want.unsqueeze(0))  # pyright: ignore


def test_freezing_a_bias_later_is_an_error_that_says_so() -> None:
    model, x, y = small()
    with kfac_of(model) as kfac:
        model.head.bias.requires_grad_(False)
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(RuntimeError, match="bias of head was frozen"):
            kfac.step()


def test_freezing_a_whole_layer_later_leaves_it_alone() -> None:
    model, x, y = small()
    with kfac_of(model, factor_decay=0.5) as kfac:
        for frozen in (False, True):
            model.head.requires_grad_(not frozen)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            kfac.step()
        assert kfac.refreshes()["statistics"]["head/A"]["refreshed"] == 1
        assert kfac.refreshes()["statistics"]["conv/A"]["refreshed"] == 2
        assert model.head.weight.grad is None
        assert model.head.bias.grad is None


class Optional(nn.Module):
    """A branch that runs only when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.branch = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        x = torch.tanh(self.stem(x))
        if branch:
            x = self.norm(torch.tanh(self.branch(x)))
        return self.head(x)


@pytest.mark.parametrize("to_none", [True, False])
def test_layers_that_did_not_run_keep_their_statistics(to_none: bool) -> None:
    torch.manual_seed(0)
    model = Optional().double()
    x, y = torch.randn(6, 3).double(), torch.randint(3, (6,))
    with kfac_of(model, factor_decay=0.5) as kfac:
        for branch in (True, False, True):
            old = {
                name: kfac.statistic(name)
                for name in ("branch/A", "branch/G", "norm/unit", "head/G")
                if kfac.refreshes()["statistics"][name]["refreshed"]
            }
            model.zero_grad(set_to_none=to_none)
            F.cross_entropy(model(torch.randn_like(x), branch), y).backward()
            kfac.step()
            for name, value in old.items():
                unchanged = torch.equal(kfac.statistic(name), value)
                assert unchanged == (name != "head/G" and not branch), name


def test_a_layer_that_first_runs_later_starts_from_its_first_estimate() -> None:
    torch.manual_seed(0)
    model = Optional().double()
    x, y = torch.randn(6, 3).double(), torch.randint(3, (6,))
    with kfac_of(model, factor_decay=0.5, refresh=Every(3, 3)) as kfac:
        F.cross_entropy(model(x, False), y).backward()
        with pytest.warns(UserWarning, match="branch, norm"):
            kfac.step()
        model.zero_grad()
        F.cross_entropy(model(x, True), y).backward()
        kfac.step()
        a, g = oracle.factors(oracle.examples(model, "branch", x, y))
        near(kfac.statistic("branch/A"), a)
        near(kfac.statistic("branch/G"), g)


def test_a_micro_batch_without_the_layer_still_counts_its_examples() -> None:
    """The loss is a mean over all examples; those without the layer add zeros to G."""
    torch.manual_seed(0)
    model = Optional().double()
    x, y = torch.randn(6, 3).double(), torch.randint(3, (6,))
    with kfac_of(model) as kfac:
        for part, branch in ((slice(0, 2), True), (slice(2, 6), False)):
            F.cross_entropy(model(x[part], branch), y[part]).div(2).backward()
        kfac.step()
        a, g = oracle.factors(oracle.examples(model, "branch", x[:2], y[:2]))
        near(kfac.statistic("branch/A"), a)
        near(kfac.statistic("branch/G"), g * 2 / 6)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_cleared_without_a_step_leave_nothing(to_none: bool) -> None:
    model, x, y = small()
    other = torch.randn_like(x)

    def run(_: KFAC) -> None:
        F.cross_entropy(model(other), y).backward()
        model.zero_grad(set_to_none=to_none)
        F.cross_entropy(model(x), y).backward()

    same(captured(model, run), reference())


def test_a_second_backward_of_a_retained_graph_counts_once() -> None:
    model, x, y = small()

    def run(_: KFAC) -> None:
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()

    same(captured(model, run), reference())


def test_a_retained_graph_changes_nothing() -> None:
    model, x, y = small()

    def run(_: KFAC) -> None:
        F.cross_entropy(model(x), y).backward(retain_graph=True)

    same(captured(model, run), reference())


def activation_bytes() -> int:
    """Bytes of the distinct storages of all live tensors that are no parameters.

    Subclasses are left out: parameters, and the fakes that torch.compile keeps.
    """
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) is Tensor and not torch._is_functional_tensor(t)
    }
    return sum(storages.values())


@pytest.mark.parametrize("norm", ["skip", "unit"])
@pytest.mark.filterwarnings("ignore")
def test_hooks_keep_no_activation_alive(norm: str) -> None:
    """After the backward, only the small moments are left, even if the loss is kept."""
    model, _, y = small()
    x = torch.randn(5, 1, 64, 64).double()
    model.hidden = nn.Linear(2 * 32 * 32, 4).double()
    largest = x.numel() * x.element_size()
    with kfac_of(model, norm=norm, skip=("hidden",)) as kfac:
        before = activation_bytes()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        model.zero_grad()
        after = activation_bytes()
        assert after - before < largest / 4
        assert loss.requires_grad
        kfac.engine.capture.take()


def test_an_input_dies_with_its_graph() -> None:
    model, x, y = small()
    with kfac_of(model):
        images = x.clone()
        dead = weakref.ref(images)
        loss = F.cross_entropy(model(images), y)
        del images
        loss.backward()
        gc.collect()
        assert dead() is None


def hook_counts(model: nn.Module) -> list[int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    tables = [len(getattr(m, kind)) for m in model.modules() for kind in kinds]
    return tables + [len(p._backward_hooks or ()) for p in model.parameters()]


@pytest.mark.parametrize("which", ["kfac", "kfac-optimizer", "spngd"])
def test_closing_removes_every_hook(which: str) -> None:
    model, x, y = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tables = ("_optimizer_step_pre_hooks", "_optimizer_state_dict_post_hooks")
    before = hook_counts(model)
    made: KFAC | SPNGD
    if which == "spngd":
        made = SPNGD(model, lr=0.1)
    elif which == "kfac":
        made = kfac_of(model)
    else:
        made = KFAC(model, optimizer)
    assert hook_counts(model) != before
    F.cross_entropy(model(x), y).backward()
    made.close()
    assert hook_counts(model) == before
    assert all(not getattr(optimizer, table) for table in tables)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="closed"):
        made.step()


def test_a_copy_of_a_hooked_model_is_independent() -> None:
    model, x, y = small()

    def run(_: KFAC) -> None:
        average = copy.deepcopy(model)
        F.cross_entropy(average(torch.randn_like(x)), y).backward()
        F.cross_entropy(model(x), y).backward()

    same(captured(model, run), reference())


def test_keyword_inputs_are_seen() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rms = nn.RMSNorm(4)
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=self.rms(x=x))

    torch.manual_seed(0)
    model = Named().double()
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    with kfac_of(model) as kfac:
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        a, g = kfac.statistic("fc/A"), kfac.statistic("fc/G")
        rms = kfac.statistic("rms/unit")
    plain = nn.Sequential(model.rms, model.fc)
    want_a, want_g = oracle.factors(oracle.examples(plain, "1", x, y))
    near(a, want_a)
    near(g, want_g)
    near(rms, oracle.norm_statistic(oracle.examples(plain, "0", x, y), "unit"))


def test_subsampling_looks_at_every_other_example() -> None:
    """One of the two halves, as if the loss were a mean over it alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(8, 3).double(), torch.randint(3, (8,))
    batch = oracle.examples(model, "0", x, y)
    halves = [oracle.factors(batch[start::2]) for start in (0, 1)]
    with kfac_of(model, subsample=2) as kfac:
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        a, g = kfac.statistic("0/A"), kfac.statistic("0/G")
    which = [torch.allclose(a, half[0]) for half in halves].index(True)
    near(a, halves[which][0])
    near(g, halves[which][1])


@pytest.mark.parametrize(
    ("size", "vectors", "enough"),
    [(10, 1, 64), (785, 1, 1570), (576, 64, 64), (4608, 49, 189), (1, 1, 64)],
)
def test_enough_examples_span_a_factor_twice(
    size: int, vectors: int, enough: int
) -> None:
    assert enough_examples(size, vectors) == enough


def looked_at(x: Tensor, a: Tensor, stride: int) -> list[int]:
    """The starts from which every so many-th row of x gives the statistic a."""
    ones = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    parts = [ones[start::stride] for start in range(stride)]
    means = [part.T @ part / len(part) for part in parts]
    return [i for i, mean in enumerate(means) if torch.allclose(a.squeeze(0), mean)]


def test_without_a_number_each_layer_looks_at_as_many_examples_as_it_needs() -> None:
    """64 of 512 where inputs and outputs are few; two for each of 100 inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(99, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(512, 99).double(), torch.randint(3, (512,))
    hidden = torch.tanh(model[0](x)).detach()
    with kfac_of(model, subsample=None) as kfac:
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        assert len(looked_at(x, kfac.statistic("0/A"), 512 // 200)) == 1
        assert len(looked_at(hidden, kfac.statistic("2/A"), 512 // 64)) == 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many examples each layer looks at, call by call."""
    counts: list[int] = []
    for kind in (Linear, Conv, Embedding):

        def observe(
            self: Any, module: Any, x: Tensor, *rest: Any, old: Any = kind.observe
        ) -> Any:
            counts.append(len(x))
            return old(self, module, x, *rest)

        monkeypatch.setattr(kind, "observe", observe)
    return counts


def examples_seen(
    seen: list[int], model: nn.Module, x: Tensor, **options: Any
) -> list[int]:
    """What each layer looks at in one step, of any loss of the outputs."""
    seen.clear()
    options = {"subsample": None} | options
    with kfac_of(model, **options) as kfac:
        model(x).square().mean().backward()
        kfac.step()
    return list(seen)


def test_what_is_looked_at_whole(seen: list[int]) -> None:
    """A small batch, counts of an embedding, inputs without a batch or without any."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    x = torch.randint(5, (300, 2))
    assert examples_seen(seen, model, x) == [300, 75]
    assert examples_seen(seen, model, x, rule=natgrad.Kronecker(sides="outputs")) == [
        300,
        75,
    ]
    assert examples_seen(seen, model, x, subsample=3) == [300, 100]
    assert examples_seen(seen, model, x[:100]) == [100, 100]
    linear = nn.Sequential(nn.Linear(200, 200)).double()
    assert examples_seen(seen, linear, torch.randn(200).double()) == [200]
    assert examples_seen(seen, linear, torch.randn(200).double(), subsample=2) == [200]
    conv = nn.Sequential(nn.Conv2d(300, 300, 1)).double()
    assert examples_seen(seen, conv, torch.randn(300, 2, 2).double()) == [300]


def test_a_layer_s_positions_count(seen: list[int]) -> None:
    """Tokens and pixels are vectors too, unless they are averaged first."""
    wide = nn.Sequential(nn.Linear(99, 5)).double()
    x = torch.randn(1005, 3, 99).double()
    assert examples_seen(seen, wide, x) == [67]
    assert examples_seen(seen, wide, x, sharing="reduce") == [201]
    conv = nn.Sequential(nn.Conv2d(8, 4, 3, groups=2)).double()
    x = torch.randn(256, 8, 4, 4).double()
    assert examples_seen(seen, conv, x) == [64]
    assert examples_seen(seen, conv, x, sharing="reduce") == [64]


class Empty(nn.Module):
    """Its first layer gets no example at all."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.fc = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.cat([x, self.none(x[:0])]))


@pytest.mark.parametrize("subsample", [None, 2])
def test_a_layer_without_examples(subsample: int | None, seen: list[int]) -> None:
    x = torch.randn(128, 3).double()
    found = examples_seen(seen, Empty().double(), x, subsample=subsample)
    assert found == [64]  # what has no examples is not looked at


class Repeated(nn.Module):
    """One layer, called many times in a forward."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.cell, self.times = nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.cell(x))
        return x


def test_a_layer_that_is_called_often_still_sees_enough_examples(
    seen: list[int],
) -> None:
    model, x = Repeated(100).double(), torch.randn(128, 4).double()
    for _ in range(2):
        assert examples_seen(seen, model, x) == 100 * [64]


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_unequal_micro_batches_weigh_what_they_are(kind: str) -> None:
    """Of 512 and of 100 examples others are looked at, each set equal in itself."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2) if kind == "linear" else nn.Conv2d(1, 2, 2, bias=False)
    model = nn.Sequential(layer, nn.Flatten()).double()
    shape = (3,) if kind == "linear" else (1, 2, 2)
    parts = [torch.randn(1, *shape).double().expand(n, *shape) for n in (512, 100)]
    statistics = []
    for subsample in (1, None):
        with kfac_of(model, subsample=subsample) as kfac:
            for x in parts:
                y = torch.zeros(len(x), dtype=torch.long)
                kfac.set_loss_terms(612, whole_step=True) if x is parts[0] else None
                (F.cross_entropy(model(x), y, reduction="sum") / 612).backward()
            kfac.step()
            statistics.append([kfac.statistic("0/A"), kfac.statistic("0/G")])
        model.zero_grad()
    for whole, some in zip(*statistics, strict=True):
        near(some, whole)
