"""The changes that ``make mutations`` makes still apply."""

import pytest
from tests.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_applies_once(name: str) -> None:
    file, old, new = MUTATIONS[name]
    text = (ROOT / "src" / "natgrad" / file).read_text()
    assert text.count(old) == 1
    assert old != new
