"""Every example and every Python block of the README runs."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONGEST = 60


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
COMMANDS = {
    "distributed": [TORCHRUN, ()],
    "distributed --kfac": [TORCHRUN, ("--kfac",)],
}


def run(path: Path, before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before = before or ("-W", "error::UserWarning:natgrad")
    done = subprocess.run(
        [sys.executable, *before, str(path), *after],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {"plain_loop", "spngd_digits"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize(
    "command", [p.stem for p in EXAMPLES if p.stem != "distributed"] + [*COMMANDS]
)
def test_an_example(command: str) -> None:
    before, after = COMMANDS.get(command, ((), ()))
    printed = run(ROOT / "examples" / f"{command.split()[0]}.py", before, after)
    last = re.findall(r"accuracy.* (\d+\.\d)%", printed)[-1]
    assert float(last) > 90


@pytest.mark.parametrize("code", blocks(ROOT / "README.md"))
def test_a_block_of_the_readme(code: str) -> None:
    """Names that a block leaves to its reader: ``loader``, ``inputs``, ``labels``."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(8, 64), torch.randint(10, (8,))
    names = {"loader": [(inputs, labels)] * 3, "inputs": inputs, "labels": labels}
    exec(compile(code, "README.md", "exec"), names)


def test_the_readme_has_a_block() -> None:
    assert blocks(ROOT / "README.md")
