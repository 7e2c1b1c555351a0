"""Start a training run under torchrun, with faults, and look at what became of it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from natgrad_lab.train.records import read_metrics

VICTIM = Path(__file__).with_name("victim.py")
ROOT = VICTIM.parent.parent.parent
SETTINGS = {
    "model.name": "mlp",
    "data.no-augment": None,
    "batch": 16,
    "log-every": 1,
    "evaluate-every": 100,
    "checkpoint-every": 0.018,
    "threads": 1,
    "refresh.kind": "every",
    "refresh.statistics": 2,
    "refresh.inverses": 3,
    "curvature.damping": 0.1,
}
"""A step is 1 / 112 of an epoch: a checkpoint every other step."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Exit status, what was printed, and the losses by step that count in the end."""

    status: int
    printed: str
    losses: dict[int, float]
    restarts: int


def arguments(recipe: str, out: Path, **settings: Any) -> list[str]:
    """The command line of a short run."""
    chosen = {**SETTINGS, **settings}
    words = ["train", recipe, "--out", str(out)]
    for name, value in chosen.items():
        words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words


def torchrun(
    words: list[str],
    faults: list[tuple[int, int, str]],
    *,
    ranks: int = 2,
    restarts: int = 20,
    timeout: float = 240.0,
) -> Outcome:
    """Run ``natgrad`` with these words on some ranks, until it ends by itself."""
    out = Path(words[words.index("--out") + 1])
    with tempfile.TemporaryDirectory() as notes:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        command += ["--monitor-interval", "0.1"]
        command += [str(VICTIM), notes, json.dumps(faults), *words]
        status, printed = _run(command, timeout)
        happened = len(list(Path(notes).iterdir()))
    records = read_metrics(out / "metrics.jsonl")
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
    return Outcome(status=status, printed=printed, losses=losses, restarts=happened)


def _run(command: list[str], timeout: float) -> tuple[int, str]:
    """Exit status and what was printed; nothing of it runs on after that."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            raise AssertionError(f"no end after {timeout} s:\n{printed}") from None
    return process.returncode, printed


def environment() -> dict[str, str]:
    """For processes that must find this tree, and each other."""
    paths = [
        str(ROOT / "src"),
        str(ROOT / "lab/src"),
        str(ROOT),
        os.environ.get("PYTHONPATH", ""),
    ]
    kept = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
