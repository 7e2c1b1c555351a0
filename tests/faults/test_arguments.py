"""Random constructor arguments and state dicts; the soak tries many more."""

import pytest
from tests.faults.arguments import (
    search,
    search_quickly,
    search_states,
    search_states_quickly,
)


@pytest.mark.parametrize("kind", ["KFAC", "SPNGD"])
def test_arguments_work_or_are_refused_by_name(kind: str) -> None:
    drawn, quick = search(kind, 30, 0), search_quickly(kind, 150, 0)
    assert min(drawn["works"], drawn["refused"]) > 2
    assert min(quick["works"], quick["refused"]) > 20


@pytest.mark.parametrize("kind", ["KFAC", "SPNGD"])
def test_states_work_or_are_refused_and_change_nothing(kind: str) -> None:
    assert search_states(kind, 30, 0)["refused"] > 10
    assert search_states_quickly(kind, 150, 0)["refused"] > 100
