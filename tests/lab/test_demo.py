"""`natgrad demo` from start to end, shortened."""

import re
from pathlib import Path

import pytest

from natgrad_lab.cli import main


@pytest.mark.slow
@pytest.mark.processes
def test_the_demo_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), "--epochs", "0.3"]) == 0
    printed, errors = capfd.readouterr()
    assert "Warning" not in errors
    for name in ("digits-kfac", "digits-polar", "digits-spngd-2-processes"):
        assert name in printed
        assert (out / name / "metrics.jsonl").is_file()
    assert "steps to 97 %" in printed
    assert re.search(r"training seconds: \d+\.\d \(digits-sgd \d+\.\d, ", printed)
    assert str(out) in printed.replace("\n", "")
    assert (out / "compare.png").is_file()
