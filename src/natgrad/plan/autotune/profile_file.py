"""Profiles on disk: TOML that ``natgrad calibrate`` writes, and where it is found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from natgrad.math.tuning import VARIABLE, Tuning, default_path
from natgrad.plan.autotune.profile import (
    Collective,
    Curve,
    HardwareProfile,
    Link,
    ModelTimes,
)


def find_calibrated() -> tuple[HardwareProfile, str] | None:
    """The calibrated profile and where it was found; None if there is none.

    The file that ``$NATGRAD_PROFILE`` names, which must exist, or `default_path`.
    """
    if named := os.environ.get(VARIABLE):
        return load_profile(named), f"{named} (${VARIABLE})"
    path = default_path()
    return (load_profile(path), str(path)) if path.is_file() else None


def load_profile(path: Path | str) -> HardwareProfile:
    """Read a profile that `save_profile` or ``natgrad calibrate`` wrote."""
    import tomllib  # slow to import, and few runs read a profile

    try:
        with Path(path).open("rb") as file:
            return profile_from_dict(tomllib.load(file))
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise ValueError(f"{path} is not a profile: {error}") from error


def profile_from_dict(data: Mapping[str, Any]) -> HardwareProfile:
    """A profile from TOML tables; what is missing has its default."""
    given = dict(data)
    legal = {f.name for f in fields(HardwareProfile)}
    if unknown := sorted(set(given) - legal):
        raise ValueError(f"Unknown in profile: {unknown}. Must be in {sorted(legal)}.")
    makes = {"eigen": Curve, "cholesky": Curve, "inside": Link, "between": Link}
    makes |= {"tuning": Tuning}
    for key, make in makes.items():
        if key in given:
            given[key] = make(**given[key])
    given["crowding"] = tuple(given.get("crowding", ()))
    given["flops"] = tuple((size, rate) for size, rate in given.get("flops", ()))
    measured = given.get("collectives", ())
    given["collectives"] = tuple(Collective(**each) for each in measured)
    models = given.get("models", {})
    given["models"] = {name: ModelTimes(**times) for name, times in models.items()}
    return HardwareProfile(**given)


def save_profile(profile: HardwareProfile, path: Path | str) -> None:
    """Write a profile as TOML."""
    plain: list[str] = []
    tables: list[str] = []
    for each in fields(profile):
        value = getattr(profile, each.name)
        if each.name == "models":
            for name, times in value.items():
                tables += ["", f'[models."{name}"]', *_lines(times)]
        elif each.name == "collectives":
            for one in value:
                tables += ["", "[[collectives]]", *_lines(one)]
        elif isinstance(value, Curve | Link | Tuning):
            tables += ["", f"[{each.name}]", *_lines(value)]
        elif value is not None:
            plain.append(f"{each.name} = {_literal(value)}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join([*plain, *tables, ""]), encoding="utf-8")


def _lines(value: Curve | Link | ModelTimes | Collective | Tuning) -> list[str]:
    names = [each.name for each in fields(value)]
    return [f"{name} = {_literal(getattr(value, name))}" for name in names]


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        parts = cast(tuple[Any, ...], value)
        return f"[{', '.join(map(_literal, parts))}]"
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        return f'"{text}"'
    return repr(value)
