"""`strategy="auto"`: where its profile is from, what it takes, and on all ranks."""

from pathlib import Path

import pytest
import torch
from tests.support.construct import construct
from tests.support.world import RankError, run_world
from torch import nn

import natgrad
from natgrad import KFAC, SPNGD, Adaptive, Budget, Every, Scheduled
from natgrad.engine.auto import find_machine
from natgrad.plan import HardwareProfile
from natgrad.plan.autotune.profile import Collective, Curve, Link, built_in
from natgrad.plan.autotune.profile_file import default_path, save_profile

CPU = torch.device("cpu")


def dear_traffic() -> HardwareProfile:
    """Sharing updates in every step is dear: whoever shares least often wins."""
    kinds = {"reduce": 0.0, "all_reduce": 0.0, "gather": 1.0}
    measured = [Collective(kind=k, ranks=2, call=v) for k, v in kinds.items()]
    return HardwareProfile(
        name="dear traffic", collectives=tuple(measured), ranks_per_node=2
    )


def dear_compute() -> HardwareProfile:
    """Traffic is free: whoever computes least on each rank wins."""
    fast = Link(latency=0.0, bandwidth=1e15)
    return HardwareProfile(name="dear compute", flop=1e-3, inside=fast, between=fast)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No profile is found unless a test puts one there."""
    monkeypatch.delenv("NATGRAD_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


# -- the profile ----------------------------------------------------------------------


def test_the_profile_given_is_preferred_to_the_one_found(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(profile: HardwareProfile | Path | None = None) -> str:
        return find_machine(profile, CPU, 2)[0].name

    assert name() == "built-in CPU"
    save_profile(HardwareProfile(name="calibrated"), default_path())
    assert default_path().is_relative_to(nowhere)
    assert name() == "calibrated"
    save_profile(HardwareProfile(name="named"), nowhere / "named.toml")
    monkeypatch.setenv("NATGRAD_PROFILE", str(nowhere / "named.toml"))
    assert name() == "named"
    assert name(default_path()) == "calibrated"
    assert name(HardwareProfile(name="object")) == "object"


def test_built_in_numbers_are_said_to_be_nobodys(nowhere: Path) -> None:
    assert "natgrad calibrate" in find_machine(None, CPU, 2)[1]
    gpu = built_in(torch.device("cuda"), 16)
    assert gpu.flop < built_in(CPU, 16).flop


def test_a_profile_that_is_not_there_is_an_error(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATGRAD_PROFILE", str(nowhere / "gone.toml"))
    with pytest.raises(FileNotFoundError, match="gone"):
        KFAC(network(), length=natgrad.Free(), strategy="auto")
    (nowhere / "gone.toml").write_text("name = ")
    with pytest.raises(ValueError, match="is not a profile"):
        KFAC(network(), length=natgrad.Free(), strategy="auto")


# -- the policy -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refresh", "expected"),
    [
        (Every(statistics=10, inverses=100), (10, 100)),
        (Every(statistics=10, inverses=2), (10, 10)),
        (Every(statistics=lambda step: 1 if step < 5000 else 100), (1.98, 1.98)),
        (Adaptive(), (10, 10)),
        (Budget(overhead=0.1), (10, 10)),
    ],
)
def test_intervals_are_means(refresh: natgrad.Refresh, expected: tuple) -> None:
    assert refresh.mean_intervals() == pytest.approx(expected, rel=0.02)


def test_a_schedule_is_averaged_over_its_start() -> None:
    often = Scheduled(steps_per_epoch=100, rule=lambda epoch: 10, always_fresh=5000)
    assert often.mean_intervals()[0] == pytest.approx(10_000 / 5500, rel=0.01)


# -- one process ----------------------------------------------------------------------


def test_the_choice_is_printed_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with construct(
        KFAC, network(), length=natgrad.Free(), strategy="auto", profile=dear_traffic()
    ) as kfac:
        assert kfac.choice is not None
        assert kfac.engine.plan.strategy == kfac.choice.strategy == "layer_wise"
    said = capsys.readouterr()
    assert said.out == ""
    assert "layer_wise on 1 ranks of dear traffic" in said.err
    with KFAC(network(), length=natgrad.Free()) as plain:
        assert (plain.choice, plain.overhead) == (None, None)


def test_the_overhead_is_told_once_passes_were_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = HardwareProfile(name="still", eigen=Curve(call=1.0))
    model = network()
    refresh = Every(statistics=2, inverses=4)
    kfac = construct(
        KFAC,
        model,
        length=natgrad.Free(),
        strategy="auto",
        profile=machine,
        refresh=refresh,
    )
    capsys.readouterr()
    for _ in range(12):
        model.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        kfac.step()
    # Four factors of a second each, every fourth step, dwarf everything else.
    assert kfac.choice is not None
    assert kfac.choice.added == pytest.approx(1.0, rel=0.01)
    assert kfac.overhead is not None
    assert kfac.overhead > 1.0
    said = capsys.readouterr().err
    assert said.count("predicted overhead over SGD") == 1
    hooks = len(model._forward_pre_hooks)
    with KFAC(network(), length=natgrad.Free()) as plain:
        assert hooks == len(plain.engine.model._forward_pre_hooks)
    kfac.close()


# -- several --------------------------------------------------------------------------


def steps(kfac: KFAC | SPNGD, model: nn.Module, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        kfac.step()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def choose_on(rank: int, folder: str) -> tuple[str, str, bool]:
    """Only rank 0's file may count: the other's does not exist."""
    model = network()
    file = Path(folder) / ("traffic.toml" if rank == 0 else "nonsense.toml")
    with construct(
        KFAC, model, length=natgrad.Free(), strategy="auto", profile=file
    ) as kfac:
        found = kfac.engine.plan.strategy
        digest = kfac.engine.plan.digest()
        automatic = steps(kfac, model, rank)
    model = network()
    with KFAC(model, length=natgrad.Free(), strategy=found) as kfac:
        named = steps(kfac, model, rank)
    same = all(torch.allclose(a, b) for a, b in zip(automatic, named, strict=True))
    return found, digest, same


@pytest.mark.processes
@pytest.mark.parametrize(
    ("machine", "expected"),
    [(dear_traffic(), "factor_wise"), (dear_compute(), "layer_wise")],
    ids=["traffic", "compute"],
)
def test_two_ranks_do_what_rank_0_finds(
    tmp_path: Path, machine: HardwareProfile, expected: str
) -> None:
    save_profile(machine, tmp_path / "traffic.toml")
    first, second = run_world(2, choose_on, str(tmp_path))
    assert first == second
    assert first[0] == expected
    assert first[2]


def fail_on(rank: int) -> str:
    try:
        construct(
            SPNGD, network(), lr=0.1, strategy="auto", profile=f"nowhere{rank}.toml"
        )
    except FileNotFoundError as error:
        return str(error)
    return "nothing"


@pytest.mark.processes
def test_what_rank_0_cannot_do_is_said_on_all() -> None:
    first, second = run_world(2, fail_on)
    assert "nowhere0.toml" in first
    assert first == second


def differ_on(rank: int) -> None:
    strategy = "auto" if rank == 0 else "layer_wise"
    construct(
        KFAC,
        network(),
        length=natgrad.Free(),
        strategy=strategy,
        profile=dear_traffic(),
    )


@pytest.mark.processes
def test_one_rank_alone_cannot_be_automatic() -> None:
    with pytest.raises(RankError, match="different plans"):
        run_world(2, differ_on, timeout=30)


# -- gradients that DDP averages after all --------------------------------------------


def dear_sums() -> HardwareProfile:
    """An all-reduce costs more than sharing updates, which costs more than nothing."""
    kinds = {"reduce": 0.0, "all_reduce": 9.0, "gather": 1.0}
    measured = [Collective(kind=k, ranks=2, call=v) for k, v in kinds.items()]
    return HardwareProfile(name="sums", collectives=tuple(measured), ranks_per_node=2)


def wrap_late(rank: int) -> tuple[str, str, str, int]:
    model = network()
    kfac = construct(
        KFAC, model, length=natgrad.Free(), strategy="auto", profile=dear_sums()
    )
    assert kfac.choice is not None
    first = kfac.choice.strategy
    replica = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        replica.zero_grad()
        replica(torch.randn(4, 6)).square().mean().backward()
        kfac.step()
    plan, chosen = kfac.engine.plan, kfac.choice.strategy
    kfac.close()
    return first, chosen, plan.strategy, len(plan.exchanges["reduce_gradients"].items)


@pytest.mark.processes
def test_a_model_wrapped_afterwards_is_chosen_for_anew() -> None:
    """Once DDP averages gradients, the all-reduce is no strategy's own any more."""
    for found in run_world(2, wrap_late):
        assert found == ("layer_wise", "factor_wise", "factor_wise", 0)
