"""Every example runs, with the packages it is about, and learns."""

import io
import os
import re
import runpy
import socket
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONGEST = 60

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROCESSES = {
    "distributed": 2,
    "distributed --kfac": 2,
    "accumulation": 2,
    "sharded_gpt": 2,
    "tensor_parallel": 4,
}
ARGUMENTS = {"compiled": ["aot_eager"]}  # the compiler's own backend takes a minute
TUNED = ("autoencoder", "picture", "poisson")
"""Regressions: they print a loss, or decibels, and take a number of steps."""
ELSEWHERE = {*" ".join(PROCESSES).split(), *TUNED}
ALONE = [p.stem for p in EXAMPLES if p.stem not in ELSEWHERE]


def accuracy(printed: str) -> float:
    return float(re.findall(r"accuracy.* (\d+\.\d)%", printed)[-1])


def test_there_is_one_for_each_way_to_train() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "accumulation",
        "activation_checkpointing",
        "autoencoder",
        "compiled",
        "distributed",
        "mixed_precision",
        "picture",
        "plain_loop",
        "poisson",
        "sharded_gpt",
        "spngd_digits",
        "tensor_parallel",
        "timm_style",
        "torchtitan_style",
        "usual_places",
        "with_accelerate",
        "with_lightning",
        "with_trainer",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("name", ALONE)
def test_an_example(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *ARGUMENTS.get(name, [])])
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.filterwarnings("error", module="natgrad")
        warnings.filterwarnings("error", message="natgrad")
        runpy.run_path(str(path), run_name="__main__")
    assert accuracy(capsys.readouterr().out) > 90


def as_rank(rank: int, world: int, port: int, path: str, arguments: list[str]) -> str:
    """Run an example as torchrun would; returns what it prints."""
    dist.barrier()  # a group that is gone breaks the other rank's connecting to it
    dist.destroy_process_group()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    names["MASTER_PORT"] = port
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    sys.argv = [path, *arguments]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.processes
@pytest.mark.parametrize("command", PROCESSES)
def test_an_example_on_several_ranks(command: str) -> None:
    name, *arguments = command.split()
    world = PROCESSES[command]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = str(ROOT / "examples" / f"{name}.py")
    first, *others = run_world(world, as_rank, world, port, path, arguments)
    assert accuracy(first) > 90
    assert not any(others)


@pytest.mark.long
def test_torchrun() -> None:
    """With torchrun itself, which `make test` does in tests/faults/test_ranks.py."""
    path = ROOT / "examples" / "accumulation.py"
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 90


@pytest.mark.parametrize("name", TUNED)
def test_an_example_that_tunes_itself(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "21"])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    numbers = re.findall(r"step \d+: (?:loss )?(-?\d[\d.e+-]*)", printed)
    first, last = float(numbers[0]), float(numbers[-1])
    if name == "picture":
        assert last > first + 10
        assert {path.name for path in tmp_path.iterdir()} == {"before.png", "after.png"}
    else:
        assert last < first / 3
