"""Self-tuned K-FAC on a dozen random networks of benchmarks/quality/robust.py."""

import json
from pathlib import Path

import pytest
from benchmarks.quality import robust


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(12))
def test_it_does_not_blow_up(number: int) -> None:
    record = robust.run(robust.Problem.draw(number), "auto", 20)
    assert robust.gained(record) < 1


def test_runs_are_resumed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robust, "RESULTS", tmp_path / "robust.jsonl")
    robust.run_all(["adam"], 2, 2, 60)
    robust.run_all(["adam"], 3, 2, 60)
    lines = (tmp_path / "robust.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]
    assert "| adam | 3 |" in robust.table(2)
