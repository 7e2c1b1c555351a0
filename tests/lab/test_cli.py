"""The command line: help, lists, and errors without a traceback."""

from pathlib import Path

import pytest

from natgrad_lab.cli import COMMANDS, main
from natgrad_lab.recipes import RECIPES
from natgrad_lab.train.command import parse

QUICK = ["--steps", "2", "--batch", "64", "--model.width", "4"]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize("name", ["compare", "recipes", "demo"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"natgrad {name}" in capsys.readouterr().out


def test_a_recipe_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "osawa2020-32k", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for setting in ("--batch", "--optimizer.lr", "--curvature.damping", "--data.mixup"):
        assert setting in printed
    assert "32768" in printed


def test_any_setting_can_be_overridden() -> None:
    given = ["--batch", "256", "--optimizer.lr", "0.3", "--targets", "90", "95"]
    given += ["--refresh.inverses", "None", "--schedule.decay-epochs", "3", "5"]
    config = parse("pauloski2020-cifar10-kfac-x1", given)
    assert (config.batch, config.optimizer.lr) == (256, 0.3)
    assert config.targets == (90.0, 95.0)
    assert config.refresh.inverses is None
    assert config.schedule.decay_epochs == (3.0, 5.0)
    assert config.epochs == 100


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in RECIPES)
    assert "75.1 ± 0.09 % top-1" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Unknown command 'trian'"),
        (["train", "digits-sdg"], "Unknown recipe 'digits-sdg'. Did you mean"),
        (["train", "--epochs", "3"], "Expected a recipe or --resume"),
        (["train", "--resume", "no/such/run"], "no/such/run is not a run"),
        (["compare", "no/such/run"], "no/such/run is not a run"),
        (["compare"], "Give at least one run folder"),
        (["recipes", "zzz"], "No recipe's name contains 'zzz'"),
        (["data", "got"], "Unknown command 'data got'"),
        (["data", "get", "mnist3"], "Must be one of"),
        (["plan", "--world", "100000000"], "Must be in [1, 65536]"),
        (["plan", "--world", "0"], "Must be in [1, 65536]"),
        (["simulate", "--world", "1", "100000000"], "Must be in [1, 65536]"),
        (["demo", "--steps", "0"], "Invalid steps=0. Must be >= 1."),
        (["calibrate", "--seconds", "-1"], "Invalid seconds=-1.0. Must be in (0, 60]."),
        (["calibrate", "--worlds", "2", "1"], "Invalid worlds=(2, 1). Must be >= 2"),
        (["calibrate", "--models", "lenet"], "Unknown model 'lenet'. Must be one of"),
        (["calibrate", "--output", "/dev/null/x"], "/dev/null"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("name", [".", ".."])
def test_a_study_stays_in_its_folder(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(f'name = "{name}"\nrecipe = "digits-sgd"\n')
    assert main(["study", "run", "my.toml"]) == 2
    assert f"my.toml: Invalid name='{name}'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["my.toml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "Invalid batch=0"),
        (["--optimizer.lr", "-1"], "Invalid optimizer.lr=-1"),
        (["--optimizer.lr", "inf"], "Invalid optimizer.lr=inf"),
        (["--epochs", "inf"], "Invalid epochs=inf. Must be > 0 and finite."),
        (["--timeout", "inf"], "Invalid timeout=inf"),
        (["--threads", "99999999999"], "Invalid threads=99999999999"),
        (["--curvature.bucket-mib", "inf"], "Invalid curvature.bucket_mib=inf"),
        (["--model.name", "mlp", "--model.width", "3"], "mlp has no width"),
        (["--optimizer.lr", "fast"], "lr"),
        (["--optimizer.name", "adagrad"], "adagrad"),
        (["--no-such-setting", "1"], "no-such-setting"),
        (["--data.name", "mnist"], "Must be one of digits"),
        (["--data.name", "cifar10", "--data.root", "no/such"], "cifar10"),
        (["--model.name", "lenet"], "Must be one of"),
        (["--batch", "100", "--micro-batch", "64"], "Must be a multiple"),
        (["--batch", "100000"], "100000"),
    ],
)
def test_a_wrong_setting_is_said(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        status = main(["train", "digits-sgd", "--out", str(tmp_path / "x"), *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    caught = capsys.readouterr()
    assert message in caught.err + caught.out
    assert "Traceback" not in caught.err + caught.out


def test_train_then_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sgd", "adamw"):
        out = ["--out", str(tmp_path / name)]
        assert main(["train", f"digits-{name}", *QUICK, *out]) == 0
    assert main(["train", "digits-sgd", *QUICK, "--out", str(tmp_path / "sgd")]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "sgd")]) == 0
    assert "is complete" in capsys.readouterr().out
    figure = tmp_path / "both.png"
    runs = [str(tmp_path / "sgd"), str(tmp_path / "adamw")]
    assert main(["compare", *runs, "--targets", "5", "--figure", str(figure)]) == 0
    assert "steps to 5 %" in capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sgd" / "curves.png").is_file()
