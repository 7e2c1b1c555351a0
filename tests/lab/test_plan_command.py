"""`natgrad plan`: tables, JSON, memory and imports."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro
from torch import nn

import natgrad
from natgrad import Adaptive, Every, Options, Polar
from natgrad.plan import make_plan
from natgrad_lab import cli
from natgrad_lab.errors import UserError
from natgrad_lab.models import build
from natgrad_lab.simulate.asked import Asked, options_asked, rules_asked
from natgrad_lab.simulate.memory import (
    exchange_bytes,
    keeps_of,
    memory_by_rank,
    parse_size,
)
from natgrad_lab.simulate.plan_command import PlanCommand, main
from natgrad_lab.simulate.work import ruled_work, work_of


def test_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model resnet8 --world 3 --strategy layer_wise --norm skip --json"
    assert main(arguments.split()) == 0
    found = json.loads(capsys.readouterr().out)
    plan = make_plan(work_of("resnet8").specs, world=3, strategy="layer_wise")
    assert found == json.loads(json.dumps(plan.to_dict()))


def test_the_table_names_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "resnet8", "--world", "2", "--norm", "skip"]) == 0
    text = capsys.readouterr().out
    for word in ("imbalance", "activations", "packed, half", "without statistics"):
        assert word in text


def test_too_little_memory_is_an_error_with_numbers() -> None:
    arguments = "--model resnet8 --world 2 --memory 1M"
    with pytest.raises(UserError, match=r"2 of 2 ranks need more than 1.0 MiB.*MiB"):
        main(arguments.split())
    assert main([*arguments.split()[:-1], "4G"]) == 0


def test_memory_adds_up() -> None:
    work = work_of("resnet8", norm="unit")
    for strategy in ("spngd", "factor_wise"):
        plan = make_plan(work.specs, world=4, strategy=strategy)
        rows = memory_by_rank(plan, work, batch=2, sharded=True)
        weights = 4 * work.parameters
        momentum = sum(row["momentum"] for row in rows)
        assert momentum == (weights if strategy == "spngd" else 4 * weights)
        held = sum(row["statistics"] for row in rows)
        assert held == 4 * sum(spec.packed for spec in plan.statistics)
        plain = memory_by_rank(plan, work, batch=2, sharded=False)
        assert {row["momentum"] for row in plain} == {weights}
        for row in rows:
            assert row["total"] == sum(v for k, v in row.items() if k != "total")


def test_bytes_by_packing_and_precision() -> None:
    """Osawa et al. 2019, Figure 4: 587 MiB of ResNet-50's statistics, whole."""
    plan = make_plan(work_of("resnet50", norm="unit").specs, world=8)
    row = exchange_bytes(plan)["reduce_statistics"]
    assert row["whole"] / 2**20 == pytest.approx(587, abs=1)
    assert row["packed"] == pytest.approx(row["whole"] / 2, rel=0.01)
    assert row["packed_half"] * 2 == row["packed"]


def test_a_mean_step_moves_what_is_due_in_it() -> None:
    work = work_of("resnet20", corrected=True)
    plan = make_plan(work.specs, world=2, strategy="factor_wise")
    rows = exchange_bytes(plan, statistics=2, inverses=10)
    assert rows["reduce_statistics"]["mean"] == rows["reduce_statistics"]["packed"] / 2
    assert rows["reduce_gradients"]["mean"] == rows["reduce_gradients"]["packed"]
    items = plan.exchanges["share_inverses"].items
    moments = sum(i.elements for i in items if i.name.endswith("/S"))
    rest = sum(i.elements for i in items) - moments
    assert rows["share_inverses"]["mean"] == pytest.approx(
        4 * (moments / 2 + rest / 10)
    )


@pytest.mark.parametrize(
    ("text", "size"), [("16G", 16 * 2**30), ("1.5 MiB", 3 * 2**19), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_that_is_none() -> None:
    with pytest.raises(UserError, match="Invalid memory='lots'"):
        parse_size("lots")


def test_any_function_that_makes_a_model_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "from torch import nn\ndef make():\n    return nn.Linear(5, 3)\n"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    given = ["--import", "mine:make", "--input", "5", "--world", "2"]
    assert main([*given, "--json"]) == 0
    blocks = json.loads(capsys.readouterr().out)["blocks"]
    assert [(b["rows"], b["cols"]) for b in blocks] == [(3, 6)]
    with pytest.raises(UserError, match="--input"):
        main(["--import", "mine:make", "--world", "2"])
    with pytest.raises(UserError, match="Cannot import"):
        main(["--import", "mine:nothing", "--input", "5", "--world", "2"])


def test_a_user_error_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "nothing", "--world", "2"]) == 2
    assert "Unknown model 'nothing'" in capsys.readouterr().err


def test_auto_says_why_and_plans_that(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "resnet50", "--world", "64", "--strategy", "auto"]
    with pytest.raises(UserError, match="--profile"):
        main(arguments)
    assert main([*arguments, "--profile", "abci"]) == 0
    text = capsys.readouterr().out
    chosen = text.split()[0]
    assert f"{chosen} on 64 ranks of abci" in text
    assert f"{chosen} on 64 ranks, placed longest_first" in text


# -- methods --------------------------------------------------------------------------


def test_options_change_the_method() -> None:
    def asked(text: str) -> Options:
        return options_asked(tyro.cli(Asked, args=text.split()))

    assert asked("--method polar") == Polar.defaults
    polar = asked("--method polar --sides both")
    rule = polar.rule
    assert (rule.sides, rule.form, polar.factor_decay) == ("both", "inverse", 0.8)
    assert asked("--inverse factored").rule.form == "inverse"
    assert asked("--rule orthogonal").rule.form == "root"
    assert asked("--statistics 3").refresh == Every(statistics=3, inverses=100)
    assert asked("--refresh adaptive").refresh == Adaptive()
    assert asked("--method spngd --inverses 4").refresh == Every(10, 4)
    for text, message in (
        ("--factor-decay 2", "Invalid factor_decay=2"),
        ("--statistics 0", "Invalid statistics=0"),
        ("--rule ekfac --sides inputs", "Invalid sides='inputs': EKFAC has"),
        ("--method polar --inverse eigen", "Invalid inverse='eigen'"),
        ("--batch-per-rank 0", "Invalid batch_per_rank=0"),
        ("--refresh adaptive --inverses 4", "--refresh adaptive"),
    ):
        with pytest.raises(UserError, match=message):
            asked(text)


def test_polar_is_planned_with_inputs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "resnet8", "--world", "2", "--method", "polar"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = {s["kind"] for block in found["blocks"] for s in block["statistics"]}
    assert (kinds, found["strategy"]) == ({"A"}, "spngd")
    assert any(rank["moment_bytes"] for rank in found["ranks"])
    assert main(arguments) == 0
    assert "statistics every 5 steps" in capsys.readouterr().out


# -- rules of groups -------------------------------------------------------------------

MIXED = "--model resnet8 --world 2 --method muon --rules convolutions=soap head=adam"


def test_a_plan_of_rules_by_group_is_the_optimizers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*MIXED.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = build("resnet8")
    groups = natgrad.groups(model, natgrad.Muon.defaults.rule)
    for group in groups:
        if group["name"] == "convolutions":
            group["rule"] = natgrad.SOAP.defaults.rule
    with natgrad.Muon(model, groups) as optimizer:
        specs = [b.spec for b in optimizer.engine.blocks]
        plan = make_plan(specs, world=2, strategy="spngd", inverse="factored")
    assert found["digest"] == plan.digest()
    kinds = {s["kind"] for b in found["blocks"] for s in b["statistics"]}
    assert kinds == {"R", "L"}
    assert found["exchanges"]["reduce_statistics"]["bytes"] == 0


def test_a_plan_shows_groups_as_the_report_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(MIXED.split()) == 0
    shown = capsys.readouterr().out
    assert "parameter groups" in shown
    assert "eigen_adam" in shown
    work = ruled_work("resnet8", natgrad.Muon.defaults, rules_asked_for(MIXED))
    moments = keeps_of(natgrad.Muon.defaults, work.ruled).of_blocks
    assert moments is not None
    model = build("resnet8")
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    others = [p for p in model.parameters() if p.dim() == 1]
    head = 64 * 10  # under Adam's rule, as vectors are
    expected = sum(m.weight.numel() for m in convolutions) + head
    assert sum(moments.values()) == expected + sum(p.numel() for p in others)


def rules_asked_for(line: str) -> Any:
    asked = tyro.cli(PlanCommand, args=line.split())
    return rules_asked(asked, asked.rules)


@pytest.mark.parametrize("pair", ["hidden", "hidden=lion", "body=muon"])
def test_a_rule_or_group_that_is_none_is_refused(pair: str) -> None:
    with pytest.raises(UserError, match=r"Must be group=rule.*embeddings.*shampoo"):
        main(["--model", "resnet8", "--rules", pair])
