"""The table of parameters: each exactly once, with its block or a reason."""

import re
from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.toys import backward, mlp
from torch import Tensor, nn

import natgrad


class Zoo(nn.Module):
    """One of everything that the report has something to say about."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 6, 3, groups=2)
        self.norm = nn.GroupNorm(2, 6)
        self.slope = nn.PReLU()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.partly = nn.Linear(6, 6)
        self.partly.weight.requires_grad_(False)
        self.skipped = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.scale = nn.Parameter(torch.ones(6))
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return x


def table(kfac: natgrad.KFAC | natgrad.SPNGD) -> dict[str, list[str]]:
    """Cells by parameter name; the header and the summary left out."""
    _, rule, *rows = kfac.report().splitlines()
    assert set(rule) == {"-"}
    summary = next(i for i, row in enumerate(rows) if " blocks, " in row)
    cells = [re.split(r"  +", row) for row in rows[:summary]]
    assert len({name for name, *_ in cells}) == len(cells)
    return {name: rest for name, *rest in cells}


def test_every_parameter_is_listed_once() -> None:
    model = Zoo()
    rows = table(
        construct(
            natgrad.KFAC,
            model,
            length=natgrad.KLClip(lr=1.0),
            norm="unit",
            skip=["skipped"],
        )
    )
    assert list(rows) == [name for name, _ in model.named_parameters()]
    assert all(cells[0] != "-" or cells[-1] != "-" for cells in rows.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "words.weight",
            ["embedding", "A 7 diagonal, G 6", "statistics leave out .* as out"],
        ),
        ("conv.weight", ["conv", "A 2x10, G 2x3"]),
        ("conv.bias", ["conv", "A 2x10, G 2x3"]),
        ("norm.weight", ["group_norm", "unit 6x2"]),
        ("slope.weight", ["-", "PReLU is not a known layer"]),
        ("frozen.weight", ["-", "frozen"]),
        ("partly.weight", ["-", "frozen"]),
        ("partly.bias", ["-", "the weight of its Linear is frozen"]),
        ("skipped.weight", ["-", "named in skip"]),
        ("skipped.bias", ["-", "named in skip"]),
        (
            "attention.in_proj_weight",
            ["in_projection", "A 7, G 3x6", "3 matrices, one A"],
        ),
        ("attention.out_proj.weight", ["linear", "A 7, G 6"]),
        ("scale", ["-", "Zoo is not a known layer"]),
    ],
)
def test_kind_or_reason(name: str, expected: list[str]) -> None:
    kfac = construct(
        natgrad.KFAC,
        Zoo(),
        length=natgrad.KLClip(lr=1.0),
        norm="unit",
        skip=["skipped"],
    )
    row = "  ".join(table(kfac)[name])
    for part in expected:
        assert re.search(part, row), row


def test_cut_factors_are_reported() -> None:
    model = nn.Sequential(nn.Linear(9, 3), nn.Conv2d(4, 6, 3, groups=2))
    rows = table(
        construct(natgrad.KFAC, model, length=natgrad.Free(), largest_factor=5)
    )
    want = ["linear", "A 2x5, G 3", "144 B", "A kept as 2 diagonal blocks"]
    assert rows["0.weight"] == want
    assert rows["1.weight"][1] == "A 6x9, G 2x3"
    assert rows["1.weight"][-1] == "2 matrices; A kept as 3 diagonal blocks"


def test_norms_are_reported_when_skipped() -> None:
    rows = table(natgrad.KFAC(mlp(), length=natgrad.KLClip(lr=1.0), norm="skip"))
    assert rows["1.weight"] == ["-", "normalisation layers are left out (norm='skip')"]


@pytest.mark.parametrize("style", ["eigen", "factored"])
def test_bytes_and_the_summary(style: Any) -> None:
    model = mlp(torch.float64)
    options: dict[str, Any] = {"rule": natgrad.Kronecker(style=style), "norm": "skip"}
    kfac = construct(
        natgrad.KFAC, model, length=natgrad.KLClip(lr=1.0), factor_decay=0.5, **options
    )
    rows = table(kfac)
    # packed triangles of A (6) and G (4), in float64
    assert rows["0.weight"] == ["linear", "A 6, G 4", f"{8 * (21 + 10)} B"]
    assert rows["0.bias"] == ["linear", "A 6, G 4"]
    parameters = 6 * 4 + 5 * 3
    lines = kfac.report().splitlines()
    first, second, third, blank, *_ = lines[-10:]
    assert blank == ""
    assert first.startswith(
        f"2 blocks, {parameters} of {parameters + 8} trained parameters (83%) "
        "preconditioned"
    )
    assert f"{8 * (21 + 10 + 15 + 6)} B of statistics" in first
    assert second == "8 parameters without a block keep their plain gradient."
    assert third.startswith("Inverting all statistics once is expected")
    backward(model, 0)
    kfac.step()
    kept = [kfac.statistic(name) for name in kfac.refreshes()["statistics"]]
    triangles = [x.shape[-1] * (x.shape[-1] + 1) // 2 for x in kept]
    assert 8 * sum(triangles) == 8 * (21 + 10 + 15 + 6)


def test_print_shows_the_report() -> None:
    for shown in (
        natgrad.KFAC(mlp(), length=natgrad.KLClip(lr=1.0)),
        natgrad.SPNGD(mlp(), lr=1.0),
    ):
        assert str(shown) == shown.report()


def test_large_sizes_have_units() -> None:
    model = nn.Linear(1023, 1, bias=False)
    assert "2.0 MiB" in natgrad.KFAC(model, length=natgrad.KLClip(lr=1.0)).report()


# -- after the fact -------------------------------------------------------------------


class Functional(nn.Module):
    """Uses the weight of one of its layers without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.used = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.called(x))
        return nn.functional.linear(x, self.used.weight, self.used.bias)


@pytest.mark.filterwarnings("ignore:natgrad saw no forward")
def test_a_layer_that_is_never_called_is_not_preconditioned() -> None:
    model = Functional().double()
    kfac = natgrad.KFAC(model, length=natgrad.KLClip(lr=1.0))
    assert "2 blocks, 39 of 39 trained parameters" in kfac.report()
    backward(model, 0)
    kfac.step()
    rows = table(kfac)
    assert "used without statistics" in rows["used.weight"][-1]
    assert "used without statistics" in rows["used.bias"][-1]
    assert "1 blocks, 24 of 39 trained parameters" in kfac.report()


def test_a_head_that_was_replaced_is_not_counted() -> None:
    model = mlp()
    kfac = natgrad.KFAC(model, length=natgrad.KLClip(lr=1.0))
    model[3] = nn.Linear(4, 7).double()
    rows = table(kfac)
    assert rows["3.weight"] == [
        "-",
        "added or unfrozen since: make the optimizer after it",
    ]
    assert "1 blocks, 24 of 67 trained parameters" in kfac.report()
    assert "not in the model any more: 3." in kfac.report()


def test_frozen_weights_are_no_part_of_the_total() -> None:
    """As of a model with adapters."""
    model = mlp()
    model[0].requires_grad_(False)
    report = natgrad.KFAC(model, length=natgrad.KLClip(lr=1.0)).report()
    assert "1 blocks, 15 of 23 trained parameters" in report
    assert "24 parameters are frozen." in report
    model = mlp()
    kfac = natgrad.KFAC(model, length=natgrad.KLClip(lr=1.0))
    model[0].requires_grad_(False)
    assert table(kfac)["0.weight"] == ["-", "frozen"]
    assert "1 blocks, 15 of 23 trained parameters" in kfac.report()


def test_it_says_what_the_rest_follows() -> None:
    polar = natgrad.Polar(mlp(), lr=1.0).report()
    assert "8 parameters without a block follow Adam's rule, at 0.2 of the" in polar
    spngd = construct(natgrad.SPNGD, mlp(), lr=1.0, norm="skip").report()
    assert "8 parameters without a block keep their plain gradient." in spngd


def test_a_class_that_is_called_like_one_of_torch_s() -> None:
    class LayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    rows = table(
        natgrad.KFAC(nn.Sequential(nn.Linear(3, 3), LayerNorm()), length=natgrad.Free())
    )
    assert rows["1.weight"] == ["-", f"{__name__}.LayerNorm is not a known layer"]
