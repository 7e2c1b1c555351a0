"""Run folders: made when a run begins, locked while it trains, read with suspicion."""

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from natgrad_lab.cli import main
from natgrad_lab.locks import SILENT_SECONDS, Lock
from natgrad_lab.recipes import find
from natgrad_lab.train import run as runs
from natgrad_lab.train.command import parse
from natgrad_lab.train.loop import Trainer
from natgrad_lab.train.manifest import MANIFEST, signed
from natgrad_lab.train.processes import World

QUICK = [
    *("--steps", "5", "--batch", "64", "--model.name", "mlp", "--threads", "1"),
    *("--checkpoint-every", "0.01", "--evaluate-every", "100"),
]


# -- starts that are refused ---------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data.name", "mnist"], "Must be one of digits"),
        (["--data.name", "cifar10", "--data.root", "no/such"], "cifar10"),
        (["--model.name", "lenet"], "Must be one of"),
        (["--seed", str(10**23)], "Invalid seed=1000"),
        (["--batch", "100", "--micro-batch", "64"], "Must be a multiple"),
    ],
)
def test_a_refused_start_leaves_no_folder(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs" / "x"
    try:
        status = main(["train", "digits-sgd", "--out", str(out), *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert said in "".join(capsys.readouterr())
    assert list(tmp_path.iterdir()) == []
    assert main(["train", "digits-sgd", "--out", str(out), *QUICK, "--steps", "1"]) == 0


def failing_at(step: int) -> Callable[[Trainer], None]:
    real = Trainer._one_step

    def one_step(self: Trainer) -> None:
        if self.step == step:
            raise OSError("no more")
        real(self)

    return one_step


def test_a_run_that_fails_in_its_first_step_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", failing_at(0))
        for name in ("mine", "new"):
            out = ["--out", str(tmp_path / name)]
            assert main(["train", "digits-sgd", *QUICK, *out]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_run_that_fails_later_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", failing_at(2))
        assert main(["train", "digits-sgd", *QUICK, "--out", str(out)]) == 2
    assert not (out / "lock").exists()
    assert main(["train", "--resume", str(out)]) == 0


# -- locks ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after four of its five steps, with two checkpoints."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    config = parse("digits-sgd", QUICK)
    run = runs.create(folder, find("digits-sgd").name, config)
    trainer = Trainer(run, World(), show=False)
    trainer.total = 4
    trainer.train()
    path = folder / "metrics.jsonl"
    lines = [x for x in path.read_text().splitlines() if '"end"' not in x]
    path.write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def owned(folder: Path, host: str, process: int, age: float = 0.0) -> None:
    """A lock that somebody has written ``age`` seconds ago, and does not hold here."""
    path = folder / "lock"
    owner = {"host": host, "process": process, "since": "then", "launch": ""}
    path.write_text(json.dumps(owner))
    then = time.time() - age
    os.utime(path, (then, then))


def test_a_folder_in_use_is_refused_by_host_and_process(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "metrics.jsonl").read_text()
    said = f"in use by process {os.getpid()} on {socket.gethostname()}"
    new = tmp_path / "new"
    with Lock(run), Lock(new):
        assert main(["train", "--resume", str(run)]) == 2
        assert said in capsys.readouterr().err
        assert main(["train", "digits-sgd", *QUICK, "--out", str(new)]) == 2
        assert said in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == before
    assert not new.exists()
    assert main(["train", "--resume", str(run)]) == 0
    assert not (run / "lock").exists()


@pytest.mark.parametrize(
    ("host", "age", "status"),
    [
        (socket.gethostname(), 0.0, 0),  # nobody holds it here: its process is gone
        ("elsewhere", 0.0, 2),
        ("elsewhere", SILENT_SECONDS + 5, 0),
    ],
    ids=["here", "elsewhere", "silent"],
)
def test_a_lock_that_was_left_behind_is_recognised(
    host: str, age: float, status: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owned(run, host, 1234, age)
    assert main(["train", "--resume", str(run)]) == status
    told = f"in use by process 1234 on {host}" in capsys.readouterr().err
    assert told == bool(status)


def test_a_restart_on_another_machine_takes_its_launch_s_lock(tmp_path: Path) -> None:
    Lock(tmp_path, "launch 7").release()
    owned(tmp_path, "elsewhere", 1234)
    text = (tmp_path / "lock").read_text()
    (tmp_path / "lock").write_text(text.replace('"launch": ""', '"launch": "launch 7"'))
    Lock(tmp_path, "launch 7").release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 3}', "\0" * 50])
def test_a_lock_that_says_nothing_is_only_a_lock(text: str, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(text)
    Lock(tmp_path).release()


# -- manifests -----------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]


def entries(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The weights' entries first: the largest."""
    found = content["tensors"].values()
    return sorted(found, key=lambda entry: entry["path"][0] != "model")


def every(**values: Any) -> Change:
    return lambda content: [entry.update(values) for entry in entries(content)]


def chunk(**values: Any) -> Change:
    return lambda content: entries(content)[0]["chunks"][0].update(values)


WRONG: dict[str, tuple[Change, str]] = {
    "weights without chunks": (
        lambda c: [e.update(chunks=[]) for e in entries(c) if e["path"][0] == "model"],
        "chunks do not make up a tensor",
    ),
    "no tensors": (lambda c: c.update(tensors={}), "It does not say where"),
    "a key missing": (lambda c: c.pop("world"), "Missing key 'world'"),
    "a step in words": (lambda c: c.update(step="four"), "step = 'four'"),
    "a step of none": (lambda c: c.update(step=-1), "Invalid step=-1"),
    "a list": (lambda c: c.update(tensors=[1]), r"tensors = \[1\]"),
    "less than nothing": (every(size=[-1]), "Invalid size"),
    "huge": (every(size=[10**15]), "chunks do not make up a tensor"),
    "huge, in its chunk": (
        lambda c: [every(size=[10**15])(c), chunk(offsets=[0], sizes=[10**15])(c)],
        "have less than 4000000000000000 bytes",
    ),
    "longer than its file": (chunk(length=10**15), "truncated"),
    "another file": (chunk(file="../../config.json"), "a name without a folder"),
    "another shape": (lambda c: transposed(entries(c)[0]), "not a tensor of size"),
    "another dtype": (every(dtype="load"), "Unknown dtype 'load'"),
    "no state": (lambda c: c.update(outline={"step": 3}), "does not fit"),
    "no container": (lambda c: c["outline"].update(scheduler=3), "does not fit"),
}


def transposed(entry: dict[str, Any]) -> None:
    entry["size"].reverse()
    for each in entry["chunks"]:
        each["sizes"].reverse()


@pytest.mark.parametrize("case", WRONG)
def test_a_manifest_that_is_wrong_is_named_and_the_older_one_used(
    case: str, run: Path
) -> None:
    """Its digest is right: it is what it says that is not."""
    change, said = WRONG[case]
    path = run / "checkpoints" / "step-00000004" / MANIFEST
    content = json.loads(json.loads(path.read_text())["content"])
    change(content)
    path.write_text(signed(content))
    resumes(run, said)


def test_a_manifest_of_a_thousand_levels_is_named(run: Path) -> None:
    deep = '{"step": 4, "world": 1, "tensors": {}, "outline": '
    deep += '{"a": ' * 50_000 + "1" + "}" * 50_001
    path = run / "checkpoints" / "step-00000004" / MANIFEST
    path.write_text(signed(deep))
    resumes(run, "nested too deeply")


def resumes(run: Path, said: str) -> None:
    """Status 0, from the older checkpoint, with a warning that names both."""
    used = r"Used step-00000003 instead; the other is now step-00000004\.broken"
    with pytest.warns(UserWarning, match=rf"{said}[\s\S]*{used}") as seen:
        assert main(["train", "--resume", str(run)]) == 0
    assert any("step-00000004" in str(each.message) for each in seen)
    records = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in records if x["kind"] == "resume"] == [3]


# -- records -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1, 2]", r"\[1, 2\]\. Must be a table"),
        ('{"kind": "test", "step": 3}', "Missing key 'accuracy'"),
        ('{"kind": "test", "step": "three"}', "step = 'three'"),
        ('{"step": 3}', "Missing key 'kind'"),
        ('{"kind" "test"}', "Expecting ':'"),
    ],
)
@pytest.mark.parametrize("command", [["compare"], ["train", "--resume"]], ids=" ".join)
def test_a_record_that_is_none_is_named_by_its_line(
    command: list[str],
    line: str,
    said: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = run / "metrics.jsonl"
    count = len(path.read_text().splitlines())
    path.write_text(f"{path.read_text()}{line}\n")
    assert main([*command, str(run)]) == 2
    expected = rf"metrics\.jsonl, line {count + 1} is damaged: [\s\S]*{said}"
    assert re.search(expected, capsys.readouterr().err)


@pytest.mark.parametrize("text", ['{"batch": 3}', "[]", '{"recipe": "x", "config": 1}'])
def test_settings_that_are_wrong_are_named(
    text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.json").write_text(text)
    assert main(["compare", str(run)]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
