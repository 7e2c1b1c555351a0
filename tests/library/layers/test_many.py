"""One weight that is several matrices: fused Q, K and V, heads, experts."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import oracle
from tests.support.oracle import near
from torch import Tensor, nn

import natgrad
from natgrad import Free, Orthogonal
from natgrad.layers import LayerOptions
from natgrad.layers.table import TABLE, kind_of

WIDTH, HEADS, CLASSES = 6, 2, 4
KEPT = dataclasses.replace(natgrad.SPNGD.defaults, factor_decay=0.5)
RULES = {
    "kronecker": natgrad.Kronecker(),
    "ekfac": natgrad.EKFAC(),
    "polar": Orthogonal(sides="inputs"),
    "inputs": natgrad.Kronecker(sides="inputs", style="relative"),
    "shampoo": natgrad.Kronecker(source="gradients", style="whole", power=0.25),
    "muon": Orthogonal(sides="none"),
}


class Fused(nn.Module):
    """Self-attention with one weight for Q, K and V."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.biased = bias
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.head = nn.Linear(WIDTH, CLASSES)

    def project(self, x: Tensor) -> Tensor:
        return self.qkv(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(torch.tanh(self.out(seen)).mean(1))


class Apart(Fused):
    """The same with a layer for each matrix."""

    def __init__(self, fused: Fused, count: int) -> None:
        biased = fused.biased
        super().__init__(bias=biased)
        del self.qkv
        self.parts = nn.ModuleList(
            nn.Linear(WIDTH, 3 * WIDTH // count, bias=biased) for _ in range(count)
        )
        with torch.no_grad():
            for part, rows in zip(
                self.parts, fused.qkv.weight.chunk(count), strict=True
            ):
                part.weight.copy_(rows)  # pyright: ignore
            if biased:
                rows = fused.qkv.bias.chunk(count)
                for part, own in zip(self.parts, rows, strict=True):
                    part.bias.copy_(own)  # pyright: ignore
        self.out.load_state_dict(fused.out.state_dict())
        del self.head
        self.head = copy.deepcopy(fused.head)  # the last layer again

    def project(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 3, WIDTH, generator=draw, dtype=torch.float64)
    return x, torch.randint(CLASSES, (12,), generator=draw)


def train(
    model: nn.Module, groups: Any, rule: natgrad.Rule, largest: int | None = None
) -> None:
    """Three steps."""
    options = dataclasses.replace(
        natgrad.SPNGD.defaults,
        rule=rule,
        length=Free(),
        decay=natgrad.Decoupled(),
        refresh=natgrad.Every(),
        damping=0.1,
        largest_factor=largest,
    )
    with natgrad.SPNGD(model, groups, lr=0.1, options=options) as optimizer:
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("count", [3, 3 * HEADS])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("largest", [None, 4])
def test_a_fused_weight_trains_as_its_matrices_do_apart(
    rule: str, count: int, largest: int | None
) -> None:
    torch.manual_seed(0)
    fused = Fused().double()
    apart = Apart(fused, count).double()
    own = natgrad.groups(fused, matrices={"qkv": count})
    train(fused, own, RULES[rule], largest)
    train(apart, natgrad.groups(apart), RULES[rule], largest)
    weights = torch.cat([part.weight for part in apart.parts])  # pyright: ignore
    biases = torch.cat([part.bias for part in apart.parts])  # pyright: ignore
    near(fused.qkv.weight, weights, rtol=1e-9, atol=1e-10)
    near(fused.qkv.bias, biases, rtol=1e-9, atol=1e-10)


def test_matrices_of_one_weight_have_one_a_and_a_g_each() -> None:
    torch.manual_seed(0)
    model, (x, y) = Fused().double(), batch()
    groups = natgrad.groups(model, matrices={"qkv": 3})
    before = oracle.examples(model, "qkv", x, y)
    with natgrad.SPNGD(model, groups, lr=0.1, options=KEPT) as optimizer:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        a, g = oracle.factors(before)
        near(optimizer.statistic("qkv/A"), a)
        near(
            optimizer.statistic("qkv/G"),
            torch.stack(
                [g[0, i : i + WIDTH, i : i + WIDTH] for i in range(0, 3 * WIDTH, WIDTH)]
            ),
        )
        (block,) = (b for b in optimizer.engine.blocks if b.name == "qkv")
        assert [s.elements for s in block.spec.statistics] == [49, 3 * 36]
        row = next(r for r in str(optimizer).splitlines() if "qkv.weight" in r)
        assert "A 7, G 3x6" in row
        assert "3 matrices, one A" in row


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ({"qkv": 4}, "Invalid matrices=4 of a weight of 18 rows. Must divide them."),
        ({"qvk": 3}, "Invalid name 'qvk' of matrices."),
        ({"head": 3}, "Invalid name 'head' of matrices."),
    ],
)
def test_what_is_no_stack_of_matrices_is_refused(
    matrices: dict[str, int], message: str
) -> None:
    model = Fused()
    with pytest.raises(ValueError, match=message):
        natgrad.Polar(model, natgrad.groups(model, matrices=matrices), lr=0.1)


def test_only_linear_layers_are_several_matrices() -> None:
    model = nn.Sequential(nn.Conv1d(3, 6, 2), nn.Flatten(), nn.Linear(6, 2))
    groups: list[dict[str, Any]] = [
        {"params": list(model.named_parameters()), "matrices": 2}
    ]
    with pytest.raises(ValueError, match=r"Invalid matrices=2 of 0, a Conv1d\."):
        natgrad.Polar(model, groups, lr=0.1)


# -- nn.MultiheadAttention -------------------------------------------------------------


class Attention(nn.Module):
    """What `Fused` computes, by torch's module."""

    def __init__(self, fused: Fused, *, batch_first: bool, weights: bool) -> None:
        super().__init__()
        biased = fused.biased
        self.attention = nn.MultiheadAttention(
            WIDTH, HEADS, bias=biased, batch_first=batch_first
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.head.load_state_dict(fused.head.state_dict())
        self.attention.out_proj.load_state_dict(fused.out.state_dict())
        self.weights = weights
        with torch.no_grad():
            for ours, theirs in zip(
                self.projection(), fused.qkv.parameters(), strict=True
            ):
                ours.copy_(theirs)

    def projection(self) -> list[nn.Parameter]:
        return list(self.attention.parameters(recurse=False))

    def forward(self, x: Tensor) -> Tensor:
        first = self.attention.batch_first
        x = x if first else x.transpose(0, 1)
        y, _ = self.attention(x, x, x, need_weights=self.weights)
        return self.head(torch.tanh(y).mean(1 if first else 0))


@pytest.mark.parametrize("rule", ["kronecker", "ekfac", "polar", "muon"])
@pytest.mark.parametrize(
    ("batch_first", "weights", "bias"),
    [(True, True, True), (False, False, True), (True, False, False)],
)
def test_multihead_attention_trains_as_linear_layers_do(
    rule: str, batch_first: bool, weights: bool, bias: bool
) -> None:
    torch.manual_seed(0)
    fused = Fused(bias=bias).double()
    torchs = Attention(fused, batch_first=batch_first, weights=weights).double()
    train(fused, natgrad.groups(fused, matrices={"qkv": 3}), RULES[rule])
    train(torchs, natgrad.groups(torchs), RULES[rule])
    ours = [*fused.qkv.parameters(), *fused.out.parameters()]
    theirs = [*torchs.projection(), *torchs.attention.out_proj.parameters()]
    for a, b in zip(ours, theirs, strict=True):
        near(a, b, rtol=1e-9, atol=1e-10)


class Reads(nn.Module):
    """Each example's queries look at its own memory."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.attention, self.same = nn.MultiheadAttention(4, 2, batch_first=True), same

    def forward(self, both: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        q, k, v = both
        return self.attention(q, k, k if self.same else v)[0].mean(1)


@pytest.mark.parametrize("same", [True, False])
def test_cross_attention_has_a_g_of_each_and_one_a_of_all_inputs(same: bool) -> None:
    torch.manual_seed(0)
    model = Reads(same).double()
    q, k, v = (torch.randn(5, t, 4, dtype=torch.float64) for t in (2, 3, 3))
    y = torch.randint(4, (5,))
    with natgrad.SPNGD(model, lr=0.1, options=KEPT) as optimizer:
        F.cross_entropy(model((q, k, v)), y).backward()
        before = copy.deepcopy(model)
        optimizer.step()
        seen = [q, k] if same else [q, k, v]
        rows = torch.cat([torch.cat([*x]) for x in seen])
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
        near(optimizer.statistic("attention/A"), (rows.T @ rows / len(rows))[None])
        g = torch.zeros(3, 4, 4, dtype=torch.float64)
        for i in range(5):
            each = [x[i : i + 1] for x in (q, k, k if same else v)]
            moved = [torch.zeros(1, x.shape[1], 4, dtype=x.dtype) for x in each]
            for shift in moved:
                shift.requires_grad_()
            logits = by_hand(before.attention, each, moved)
            F.cross_entropy(logits, y[i : i + 1]).backward()
            for member, shift in enumerate(moved):
                assert shift.grad is not None
                g[member] += shift.grad[0].T @ shift.grad[0] / 5
        near(optimizer.statistic("attention/G"), g)


def by_hand(
    module: nn.MultiheadAttention, inputs: list[Tensor], moved: list[Tensor]
) -> Tensor:
    """The mean output of attention, with something added to each projection."""
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    q, k, v = (
        (F.linear(x, w, b) + shift).unflatten(-1, (2, 2)).transpose(1, 2)
        for x, w, b, shift in zip(inputs, weights, biases, moved, strict=True)
    )
    seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return module.out_proj(seen).mean(1)


def test_a_forward_that_fails_leaves_torch_as_it_was() -> None:
    model = Attention(Fused(), batch_first=True, weights=True)
    with natgrad.Polar(model, lr=0.1):
        with pytest.raises(AssertionError):
            model(torch.randn(5, 3, WIDTH + 1))
        assert torch.overrides._len_torch_function_stack() == 0  # pyright: ignore


def test_layers_of_a_transformer_are_all_seen() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.1, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(3 * WIDTH, CLASSES))
    x, y = batch()
    with natgrad.KFAC(model, length=Free()) as kfac:
        F.cross_entropy(model(x.float()), y).backward()
        kfac.step()
        assert "used without statistics" not in str(kfac)
        assert {n.rpartition("/")[0] for n in kfac.engine.statistics.last.inverted} == {
            *("0.self_attn", "0.self_attn.out_proj", "0.linear1", "0.linear2", "2")
        }


# -- experts ---------------------------------------------------------------------------


class Expert(nn.Module):
    """A linear layer for each expert, of tokens that are sorted by expert."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        weight = torch.randn(experts, outputs, inputs) / inputs**0.5
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.randn(experts, outputs)) if bias else None

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        if sizes is None:
            return torch.bmm(x, self.weight.mT)
        rows = x.split(sizes.tolist())
        each = [a @ w.T for a, w in zip(rows, self.weight, strict=True)]
        if self.bias is not None:
            each = [y + b for y, b in zip(each, self.bias, strict=True)]
        return torch.cat(each)


class Mixture(nn.Module):
    """Each example goes to the expert that it is given, or to places for it."""

    def __init__(self, *, bias: bool = True, padded: bool = False) -> None:
        super().__init__()
        self.experts = Expert(EXPERTS, 3, WIDTH, bias)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.padded = padded

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        order = to.argsort(stable=True)
        sizes = torch.bincount(to, minlength=EXPERTS)
        if not self.padded:
            y = self.experts(x[order], sizes)
        else:
            places = torch.zeros(EXPERTS, len(x), 3, dtype=x.dtype)
            places[to, torch.arange(len(x))] = x
            y = self.experts(places)[to, torch.arange(len(x))][order]
        return self.head(torch.tanh(y[order.argsort()]))


EXPERTS = 4


@pytest.fixture
def registered() -> Iterator[None]:
    """`Expert` is a known layer."""
    natgrad.register_layer(Expert, "experts")
    yield
    TABLE.pop(Expert)


def routed(seed: int, silent: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 3, generator=draw, dtype=torch.float64)
    to = torch.randint(EXPERTS, (20,), generator=draw)
    to = to if silent is None else torch.where(to == silent, (silent + 1) % EXPERTS, to)
    return x, to, torch.randint(CLASSES, (20,), generator=draw)


def by_expert(
    model: Mixture, x: Tensor, to: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """A and G of each expert, an example at a time; zeros of one without any."""
    bias = model.experts.bias
    size = 3 + (bias is not None)
    a, g = torch.zeros(EXPERTS, size, size), torch.zeros(EXPERTS, WIDTH, WIDTH)
    a, g = a.double(), g.double()
    for i, e in enumerate(to.tolist()):
        out = model.experts.weight[e] @ x[i]
        out = (out if bias is None else out + bias[e]).detach().requires_grad_()
        logits = model.head(torch.tanh(out))[None]
        (grad,) = torch.autograd.grad(F.cross_entropy(logits, y[i : i + 1]), out)
        row = x[i] if bias is None else torch.cat([x[i], x.new_ones(1)])
        a[e] += torch.outer(row, row) / (to == e).sum()
        g[e] += torch.outer(grad, grad) / len(x)
    return a, g


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("bias", "padded"), [(True, False), (False, True)])
def test_experts_have_statistics_of_their_own_tokens(bias: bool, padded: bool) -> None:
    torch.manual_seed(0)
    model = Mixture(bias=bias, padded=padded).double()
    with natgrad.SPNGD(
        model, lr=0.1, options=dataclasses.replace(KEPT, refresh=natgrad.Every())
    ) as optimizer:
        want: list[Tensor] = []
        # the second never has a token in the first step, the first not in the second
        for step, silent in enumerate((1, 0, None)):
            x, to, y = routed(step, silent)
            now = by_expert(model, x, to, y)
            used = torch.bincount(to, minlength=EXPERTS) > 0
            for i, new in enumerate(now):
                if step == 0:
                    want.append(new)
                    continue
                old, seen = want[i], used[:, None, None]
                known = old.flatten(1).any(1)[:, None, None]
                want[i] = torch.where(known, (old + new) / 2, new).where(seen, old)
            optimizer.zero_grad()
            F.cross_entropy(model(x, to), y).backward()
            optimizer.step()
            near(optimizer.statistic("experts/A"), want[0])
            near(optimizer.statistic("experts/G"), want[1])
        assert all(p.isfinite().all() for p in model.parameters())
        row = next(r for r in str(optimizer).splitlines() if "experts.weight" in r)
        assert "4 matrices" in row


def stacked_gradient(experts: Expert) -> Tensor:
    """Of weight and bias, ``(s, m, n)``."""
    found = [p.grad for p in experts.parameters() if p.grad is not None]
    return torch.cat([x.reshape(EXPERTS, WIDTH, -1) for x in found], 2)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("rule", ["kronecker", "polar", "inputs"])
def test_an_expert_is_scaled_by_its_own_factors(rule: str) -> None:
    torch.manual_seed(0)
    model = Mixture().double()
    x, _, y = routed(0)
    to = torch.arange(20) % EXPERTS
    options = dataclasses.replace(
        natgrad.KFAC.defaults, rule=RULES[rule], length=Free(), damping=0.1
    )
    with natgrad.KFAC(model, options=options) as kfac:
        F.cross_entropy(model(x, to), y).backward()
        plain = stacked_gradient(model.experts)
        a, g = by_expert(model, x, to, y)
        kfac.step()
        update = stacked_gradient(model.experts)
    relative = 0.1 * torch.diagonal(a, dim1=1, dim2=2).mean() * torch.eye(4).double()
    if rule == "kronecker":
        near(update, oracle.solve(oracle.kronecker(g, a), plain, 0.1), rtol=1e-8)
    elif rule == "inputs":
        near(update, plain @ torch.linalg.inv(a + relative), rtol=1e-8)
    else:
        root = torch.linalg.cholesky(torch.linalg.inv(a + relative))
        u, _, v = torch.linalg.svd(plain @ root, full_matrices=False)
        near(update, u @ v @ root.mT, rtol=0, atol=0.02)


@pytest.mark.usefixtures("registered")
def test_tokens_without_their_numbers_are_refused() -> None:
    kind = kind_of(Expert(1, 3, 2, False), LayerOptions())
    assert kind is not None
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match="how many each"):
        kind.observe(Expert(1, 3, 2, False), x, x, {"A"})
