"""Self-tuned K-FAC on a dozen random networks of benchmarks/quality/robust.py."""

import dataclasses
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


def test_the_page_names_what_is_behind_adam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robust, "RESULTS", tmp_path / "robust.jsonl")
    fixed = dataclasses.asdict(robust.Problem.draw(101)) | {"steps": 2, "first": 2.0}
    ends = [(101, "adam", 1.0), (101, "auto", 1.5), (7, "adam", 1.0), (7, "auto", 1.0)]
    for number, name, last in ends:
        record = fixed | {"number": number, "contender": name, "last": last}
        with robust.RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")
    text = robust.page(2)
    assert (
        "1 networks from 100 on, `auto` has 1 finite and below their start and 0"
        in text
    )
    assert text.splitlines()[-1].startswith("| 101 | ")
    assert "| 7 |" not in text
