"""A small study on digits, trained once for all tests that look at one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.study.made import tiny

from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import make_plan
from natgrad_lab.study.storage import Storage
from natgrad_lab.study.worker import work


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ledger, Path]]:
    """`tiny`, worked on to the end by one worker, and its folder."""
    folder = tmp_path_factory.mktemp("tiny")
    spec = tiny()
    storage = Storage(f"sqlite:///{folder}/study.db", create=True)
    ledger = Ledger.plan(storage, spec, make_plan(spec))
    tally = work(ledger, folder, say=lambda line: None)
    assert (tally.done, tally.diverged, tally.interrupted) == (4, 2, False)
    yield ledger, folder
    storage.close()
