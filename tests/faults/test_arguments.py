"""Random constructor arguments and state dicts; the soak tries many more."""

import pytest
from tests.faults.arguments import KINDS, search, unworkable
from tests.faults.states import VARIANTS, search_states


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_work_or_are_refused_by_name(kind: str) -> None:
    counts = search(kind, 150, 0)
    assert min(counts["works"], counts["refused"]) > 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_every_legal_choice_works_in_some_set(kind: str) -> None:
    assert unworkable(kind) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_work_or_are_refused_and_change_nothing(variant: str) -> None:
    assert search_states(variant, 100, 0)["refused"] > 70
