"""What the soak counts: pieces of the code as it is, and nothing left behind."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.faults import cells, soak
from tests.faults.left import all_hooks, is_flat, slope
from tests.faults.parts import PARTS
from tests.support.fleet import RULES
from tests.support.toys import mlp, sgd, train

from natgrad.plan.strategies import STRATEGIES


def entry(part: str, piece: int, digest: str, lost: int = 0) -> str:
    numbers = {"faults": 7, "lost": lost, "diverged": 0, "seconds": 1.0}
    names = {"part": part, "pieces": [piece], "digest": digest}
    return json.dumps({**names, "commit": f"of-{digest}", **numbers})


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "soak.jsonl"
    lines = [entry("killed", 0, "old", lost=1), entry("killed", 0, "")]
    lines += [entry("killed", 1, "new"), entry("hung", 99, "new")]
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(soak, "RESULTS", path)
    monkeypatch.setattr(soak, "code", lambda: "new")
    return path


def test_pieces_of_all_commits_add_up_and_name_them(results: Path) -> None:
    """But not what was run on files that were not committed, nor a piece that is no
    part of the soak any more.
    """
    found = [(r["part"], r["pieces"], r["commit"]) for r in soak.done()]
    assert found == [("killed", [0], "of-old"), ("killed", [1], "of-new")]
    page = soak.report()
    assert "| 14 | 1 | 0 | of-old (1 pieces), of-new (1 pieces) |" in page
    assert "| all | 14 | 1 | 0 | |" in page
    assert "killed (28), hung (4)" in page


def test_a_piece_that_was_run_again_counts_once(results: Path) -> None:
    with results.open("a") as file:
        file.write(entry("killed", 0, "new") + "\n")
    assert [r["pieces"] for r in soak.done("new")] == [[1], [0]]
    assert "| 14 | 0 | 0 | of-new |" in soak.report()


def test_a_piece_that_breaks_is_lost_and_the_rest_goes_on(results: Path) -> None:
    def breaks(piece: int) -> Any:
        raise TimeoutError(f"ranks [{piece}] still run")

    soak.run_piece("killed", 2, breaks)
    assert soak.done("new")[-1]["error"] == "TimeoutError: ranks [2] still run"
    assert "| all | 14 | 2 | 0 | |" in soak.report()


def test_the_page_counts_by_kind(results: Path) -> None:
    cell = {
        "cell": ["kfac ddp", "eigen", "spngd", 2],
        "kinds": ["lr", "killed in forward"],
        "lost kinds": ["lr"],
        "slowest": {"killed in forward": 1.25},
        "unnamed": 1,
    }
    soak.run_piece(
        "cells", 0, lambda _: {**cell, "faults": 2, "lost": 1, "diverged": 0}
    )
    page = soak.report()
    assert "| killed in forward | 1 | 0 | 1.2 |" in page
    assert "| lr | 1 | 1 |  |" in page
    assert "In 1 of them" in page


def test_a_thousand_faults_are_planned() -> None:
    """With those that lab runs meet: see the parts."""
    others = {"numbers": 40, "damaged": 40, "full": 30, "killed": 7, "hung": 1}
    others |= {"fewer": 2, "torchrun": 3, "cells": cells.FAULTS}
    assert sum(n * PARTS[part][1] for part, n in others.items()) >= 1000
    assert {c.strategy for c in cells.CELLS} == {*STRATEGIES, "hybrid(0.5)"}
    assert {c.rule for c in cells.CELLS} == {*RULES, ""}


def test_every_kind_of_fault_is_drawn_often() -> None:
    met: Counter[str] = Counter()
    for number, cell in enumerate(cells.CELLS):
        source = random.Random(number)
        world = 2 if cell.is_ddp else source.choice([2, 2, 3])
        met.update(f.kind for f in cells._drawn(source, cell, world))
    assert set(met) == {*cells.DATA, *cells.TOLD, *cells.FATAL}
    assert min(met.values()) >= 8


def test_some_faults_of_a_cell_leave_no_trace() -> None:
    """One of each sort; the soak has many."""
    number = cells.CELLS.index(cells.Cell("spngd", "factored", "spngd"))
    faults = [
        cells.Fault("lr", 1, 1),
        cells.Fault("empty batch on one rank", 2, 0),
        cells.Fault("raised after agreeing, lives", 4, 1),
    ]
    result = cells.run_cell(number, faults)
    assert (result["faults"], result["lost"], result["diverged"]) == (3, 0, 0)
    assert result["slowest"]["raised after agreeing, lives"] < cells.PROMPT


def test_a_sum_of_pieces_does_not_count_beside_one_that_was_run_again(
    results: Path,
) -> None:
    both = json.loads(entry("hung", 0, "old")) | {"pieces": [0, 1]}
    with results.open("a") as file:
        file.write(json.dumps(both) + "\n")
    assert soak.left(soak.done())["hung"] == [2, 3]
    with results.open("a") as file:
        file.write(entry("hung", 1, "new") + "\n")
    assert soak.left(soak.done())["hung"] == [0, 2, 3]


@pytest.mark.parametrize(("again", "known"), [(False, (0, 1)), (True, (1,))])
def test_pieces_of_other_code_are_run_again_on_request(
    results: Path, monkeypatch: pytest.MonkeyPatch, again: bool, known: tuple[int, ...]
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(soak, "run_piece", lambda part, n, _: ran.append((part, n)))
    soak.run_pieces(1e9, ["killed"], again)
    assert ran == [("killed", n) for n in range(30) if n not in known]


def test_code_that_is_not_committed_is_not_run(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "code", lambda: "")
    with pytest.raises(SystemExit, match="commit src and tests/faults"):
        soak.run_pieces(1e9, ["killed"])


def test_what_counts_as_left_behind() -> None:
    before = {"threads": 1, "files": 9, "processes": 0}
    assert slope([(0, 10.0), (5_000, 11.5), (10_000, 13.0)]) == pytest.approx(3.0)
    assert is_flat(1.9, before, before)
    assert not is_flat(2.1, before, before)
    for name in before:
        assert not is_flat(0.0, before, {**before, name: before[name] + 1})


def test_hooks_of_every_kind_are_counted_and_none_is_left() -> None:
    model: Any = mlp()
    optimizer, k = sgd(model)
    placed = all_hooks(model, optimizer)
    train(model, optimizer, range(1))
    assert placed > 4
    k.close()
    assert all_hooks(model, optimizer) == 0
    handles: list[Any] = [
        model[0].register_forward_pre_hook(lambda *_: None),
        model[0].register_full_backward_hook(lambda *_: None),
        model[0].weight.register_hook(lambda g: g),
        model[0].weight.register_post_accumulate_grad_hook(lambda p: None),
        optimizer.register_step_post_hook(lambda *_: None),
    ]
    assert all_hooks(model, optimizer) == len(handles)


def test_some_faults_of_a_sharded_model_leave_no_trace() -> None:
    """A killed rank, a NaN in one shard, ranks that disagree."""
    number = cells.SHARDED.index(cells.Cell("polar sharded", "", "spngd"))
    faults = [
        cells.Fault("lr", 1, 1),
        cells.Fault("NaN on one rank", 2, 0),
        cells.Fault("killed in an exchange", 3, 1),
    ]
    result = cells.run_sharded(number, faults)
    assert (result["faults"], result["lost"], result["diverged"]) == (3, 0, 0)
