"""optuna-dashboard opens a study's storage as it is."""

import json
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from tests.lab.study.made import curve, tiny
from tests.lab.study.postgres import MissingError, postgres

from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import make_plan
from natgrad_lab.study.storage import Storage

dashboard = pytest.importorskip(
    "optuna_dashboard",
    reason="optuna-dashboard is not installed: natgrad-lab[dashboard]",
)


def get(address: str, path: str) -> dict[str, Any]:
    """What the dashboard on a storage answers to its own page."""
    environment: dict[str, Any] = {"PATH_INFO": path}
    setup_testing_defaults(environment)
    seen: list[str] = []
    application = dashboard.wsgi(address)
    body = b"".join(application(environment, lambda status, *_: seen.append(status)))
    assert seen == ["200 OK"], body
    return json.loads(body)


def look(address: str) -> dict[str, Any]:
    """The details of the only study."""
    (summary,) = get(address, "/api/studies")["study_summaries"]
    assert summary["study_name"] == "tiny"
    return get(address, f"/api/studies/{summary['study_id']}")


def test_it_shows_a_study_s_trials_and_curves(trained: tuple[Ledger, Path]) -> None:
    ledger, _ = trained
    detail = look(ledger.storage.address)
    rows = detail["trials"]
    states = [each["state"] for each in rows]
    assert (states.count("Complete"), states.count("Fail")) == (4, 2)
    assert detail["has_intermediate_values"]
    done = next(each for each in rows if each["state"] == "Complete")
    assert {each["name"] for each in done["params"]} >= {"batch", "lr", "seed"}
    assert {each["key"] for each in done["user_attrs"]} >= {"method", "schedule"}
    assert done["intermediate_values"][0]["step"] == 0


def test_it_opens_postgresql_with_the_driver_in_the_address(tmp_path: Path) -> None:
    spec = tiny()
    plan = make_plan(spec)
    try:
        with postgres() as server:
            storage = Storage(server.address)
            ledger = Ledger.plan(storage, spec, plan)
            claim = ledger.claim(plan, tmp_path)
            assert claim is not None
            ledger.finish(claim, curve([2.0, 1.0]))
            claim.drop()
            address = server.address.replace("postgresql:", "postgresql+psycopg:")
            assert len(look(address)["trials"]) == 6
            storage.close()
    except MissingError as missing:
        pytest.skip(str(missing))
