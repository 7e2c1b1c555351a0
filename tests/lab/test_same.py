"""`benchmarks.same` sees what is equal, what differs and what fails."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from benchmarks.same import driver
from benchmarks.same.__main__ import chosen, compare, verdict, written
from benchmarks.same.cases import CASES


def ran(**changes: Any) -> dict[str, Any]:
    """The outcome of a case on one rank, as the driver has it."""
    case = replace(CASES["KFAC on vectors"], **changes)
    return driver.attempt(json.loads(json.dumps(asdict(case))), 0)


def test_a_run_equals_itself_and_a_little_damping_is_a_difference() -> None:
    first, more = ran(), ran(options={"damping": 1.001e-3})
    assert verdict(first, ran()) == "equal"
    assert verdict(first, more).startswith("differs: weights, state (")
    assert "Invalid damping=-1.0" in verdict(first, ran(options={"damping": -1.0}))


def outcome(**parts: Any) -> dict[str, Any]:
    return {"weights": "w", "state": ["a", "b", "b"], "refreshes": {}, **parts}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({}, "equal"),
        ({"state": ["b", "a", "b"]}, "equal"),
        ({"weights": "x"}, "differs: weights"),
        ({"state": ["a", "a", "b"]}, "differs: state (1 of 3 tensors are 1 others)"),
        ({"refreshes": {"0/A": [1, 0, 1]}}, "differs: refreshes"),
        ({"error": "ValueError: no"}, "fails now: ValueError: no"),
    ],
)
def test_the_verdict_names_what_differs(parts: dict[str, Any], says: str) -> None:
    assert verdict(outcome(), outcome(**parts)) == says


def test_one_rank_that_differs_is_named() -> None:
    old = {"3": [{"case": outcome()} for _ in range(3)]}
    new = json.loads(json.dumps(old))
    new["3"][2]["case"]["weights"] = "x"
    table = compare(old, new)
    assert table == {"case": {"3": "rank 2 differs: weights"}}
    text = written(table)
    assert "case, 3 ranks: rank 2 differs: weights" in text
    assert "1 cases, 1 comparisons: 0 equal, 1 not." in text


def test_the_cases_cover_ranks_and_strategies() -> None:
    worlds = {world for case in CASES.values() for world in case.worlds}
    assert worlds == {1, 3}
    strategies = {case.options.get("strategy") for case in CASES.values()}
    assert strategies >= {"factor_wise", "layer_wise", "spngd", "hybrid(0.67)"}
    assert len(CASES) >= 24


def test_an_unknown_case_is_an_error() -> None:
    with pytest.raises(SystemExit, match="No case contains 'nothing'"):
        chosen("nothing")
