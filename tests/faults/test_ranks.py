"""Ranks that are killed, hang, fail or are told to go: the run goes on from there."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.faults.agent import Agent, preload
from tests.faults.launch import Outcome, arguments, torchrun

from natgrad_lab.train.meeting import meet

pytestmark = [pytest.mark.processes, pytest.mark.slow]
STEPS = 10


def words(out: Path, recipe: str = "digits-spngd", **settings: Any) -> list[str]:
    return arguments(recipe, out, steps=STEPS, **settings)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run to which nothing happens."""
    preload()
    outcome = Agent(words=words(tmp_path_factory.mktemp("calm") / "run")).run()
    assert outcome.status == 0, outcome.printed
    assert list(outcome.losses) == list(range(1, STEPS + 1))
    return outcome.losses


def require_same(outcome: Outcome, calm: dict[int, float], faults: int) -> None:
    assert outcome.status == 0, outcome.printed
    assert outcome.restarts == faults, outcome.printed
    assert outcome.losses == calm, outcome.printed


KILLED = [
    (1, 2, "forward"),
    (0, 0, "load"),
    (0, 4, "exchange"),
    (1, 5, "backward"),
    (1, 6, "save"),
    (0, 8, "commit"),
]


def test_killed_at_any_point_the_loss_curve_is_the_same(
    calm: dict[int, float], tmp_path: Path
) -> None:
    """Some of the points; the soak has all."""
    outcome = Agent(words=words(tmp_path / "run"), faults=KILLED).run()
    require_same(outcome, calm, len(KILLED))
    assert not list((tmp_path / "run" / "checkpoints").glob("*.broken*"))


def test_kfac_under_ddp_goes_on_as_well(tmp_path: Path) -> None:
    preload()
    calm = Agent(words=words(tmp_path / "calm", "digits-kfac")).run()
    assert calm.status == 0, calm.printed
    faults = [(0, 3, "exchange"), (1, 6, "backward")]
    outcome = Agent(words=words(tmp_path / "run", "digits-kfac"), faults=faults).run()
    require_same(outcome, calm.losses, len(faults))


def test_torchrun_itself_restarts_and_the_run_goes_on(
    calm: dict[int, float], tmp_path: Path
) -> None:
    faults = [(1, 5, "exchange")]
    outcome = torchrun(words(tmp_path / "run"), faults, restarts=2)
    require_same(outcome, calm, 1)
    assert "Rank 1 is gone" in outcome.printed
    assert "Traceback" not in outcome.printed


def test_with_fewer_ranks_it_goes_on(calm: dict[int, float], tmp_path: Path) -> None:
    faults = [(3, 3, "forward"), (1, 6, "exchange")]
    agent = Agent(words=words(tmp_path / "run"), faults=faults, ranks=(4, 2, 1))
    outcome = agent.run()
    assert outcome.status == 0, outcome.printed
    assert [len(each) for each in agent.statuses] == [4, 2, 1]
    assert list(outcome.losses) == list(calm)
    for step, loss in outcome.losses.items():
        assert math.isclose(loss, calm[step], rel_tol=1e-5), step


def test_a_rank_that_hangs_or_fails_is_named_on_the_others(
    calm: dict[int, float], tmp_path: Path
) -> None:
    chosen = words(tmp_path / "run", timeout=4)
    faults = [(1, 3, "hang"), (0, 6, "raise")]
    agent = Agent(words=chosen, faults=faults)
    outcome = agent.run()
    assert outcome.status == 0, outcome.printed
    assert outcome.losses == calm
    # with the start and three steps, on a machine that may be busy
    assert agent.failed_after[0] < 60.0
    assert "but rank 1 is stuck" in outcome.printed
    assert "Rank 0 failed: ValueError: raised on purpose" in outcome.printed


def test_sigterm_saves_and_ends_cleanly(calm: dict[int, float], tmp_path: Path) -> None:
    agent = Agent(words=words(tmp_path / "run"), faults=[(1, 4, "stop")])
    outcome = agent.run()
    assert agent.statuses == [[75, 75], [0, 0]], outcome.printed
    assert "Traceback" not in outcome.printed
    require_same(outcome, calm, 1)


def test_every_start_gets_keys_of_its_own() -> None:
    """Also if a rank died before the others came, and left its word behind."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(size: int) -> list[str]:
        clients = [
            dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(size)
        ]
        names = [""] * size

        def come(rank: int) -> None:
            names[rank] = meet(clients[rank], rank, size, 20.0)

        threads = [threading.Thread(target=come, args=(r,)) for r in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return names

    seen = [start(2), start(3)]
    with pytest.raises(TimeoutError, match=r"Ranks \[1\] have not come"):
        meet(store, 0, 2, 0.3)
    seen.append(start(2))
    assert all(len(set(names)) == 1 for names in seen)
    assert len({names[0] for names in seen}) == 3
