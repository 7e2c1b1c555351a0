"""Sizes at which ways of computing change: from a calibrated profile, or built in."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from natgrad.math import tuning as tuned
from natgrad.math.inverse import damped_inverses
from natgrad.math.tuning import CPU, PLAIN, Tuning, tuning_of
from natgrad.plan import HardwareProfile, load_profile
from natgrad.plan.autotune.profile_file import save_profile

MEASURED = replace(CPU, batched_up_to=16, panel=64, convolution=7.5)


def forget() -> None:
    tuned._calibrated.cache_clear()
    tuned._tuning.cache_clear()


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a calibrated profile is looked for; nothing is there yet."""
    path = tmp_path / "profile.toml"
    monkeypatch.setenv("NATGRAD_PROFILE", str(path))
    forget()
    yield path
    forget()


def on(device: str) -> Tuning:
    return tuning_of(torch.empty(1, device=device))


def test_without_a_profile_a_cpu_has_its_own_and_other_devices_none(
    calibrated: Path,
) -> None:
    assert on("cpu") == CPU
    assert on("meta") == PLAIN
    assert PLAIN.panel == PLAIN.convolution == 0


def test_a_calibrated_profile_decides_on_its_kind_of_device_alone(
    calibrated: Path,
) -> None:
    profile = HardwareProfile(name="here", tuning=MEASURED)
    save_profile(profile, calibrated)
    assert load_profile(calibrated) == profile
    assert on("cpu") == MEASURED
    assert on("meta") == PLAIN
    forget()
    save_profile(HardwareProfile(name="older"), calibrated)
    assert on("cpu") == CPU


def test_it_is_read_once(calibrated: Path) -> None:
    assert on("cpu") == CPU
    save_profile(HardwareProfile(name="here", tuning=MEASURED), calibrated)
    assert on("cpu") == CPU


def test_inverses_do_not_depend_on_it(calibrated: Path) -> None:
    x = torch.randn(3, 20, 20, dtype=torch.float64)
    matrices = list((x @ x.mT).split(1))
    batched = damped_inverses(matrices, [0.1, 0.2, 0.3])
    save_profile(HardwareProfile(name="here", tuning=MEASURED), calibrated)
    forget()
    for one, other in zip(
        batched, damped_inverses(matrices, [0.1, 0.2, 0.3]), strict=True
    ):
        assert isinstance(one, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [{"panel": -1}, {"block_bytes": 0}, {"copy": 0.0}])
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Invalid tuning"):
        replace(CPU, **wrong)
