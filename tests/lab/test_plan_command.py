"""`natgrad plan`: tables, JSON, memory and imports."""

import json
import sys
from pathlib import Path

import pytest

from natgrad.plan import make_plan
from natgrad_lab import cli
from natgrad_lab.errors import UserError
from natgrad_lab.simulate.memory import exchange_bytes, memory_by_rank, parse_size
from natgrad_lab.simulate.plan_command import main
from natgrad_lab.simulate.work import work_of


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
        rows = memory_by_rank(plan, work, batch=2)
        weights = 4 * work.parameters
        momentum = sum(row["momentum"] for row in rows)
        assert momentum == (weights if strategy == "spngd" else 4 * weights)
        held = sum(row["statistics"] for row in rows)
        assert held == plan.statistics_bytes
        for row in rows:
            assert row["total"] == sum(v for k, v in row.items() if k != "total")


def test_bytes_by_packing_and_precision() -> None:
    """Osawa et al. 2019, Figure 4: 587 MiB of ResNet-50's statistics, whole."""
    plan = make_plan(work_of("resnet50", norm="unit").specs, world=8)
    row = exchange_bytes(plan)["reduce_statistics"]
    assert row["whole"] / 2**20 == pytest.approx(587, abs=1)
    assert row["packed"] == pytest.approx(row["whole"] / 2, rel=0.01)
    assert row["packed_half"] * 2 == row["packed"]


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


def test_the_split_is_said_to_be_planned_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = "--model resnet50 --world 64 --inverse factored --profile abci --split"
    assert main(arguments.split()) == 0
    assert "planned, not executed" in capsys.readouterr().out
