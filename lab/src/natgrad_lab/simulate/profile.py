"""Hardware profiles by name: the papers' machines, or a file of `natgrad calibrate`."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

from natgrad.plan import HardwareProfile
from natgrad.plan.autotune import (
    default_path,
    load_profile,
    profile_from_dict,
)
from natgrad_lab.errors import UserError

BUILT_IN = ("abci", "frontera")


def find_profile(name: str) -> HardwareProfile:
    """A built-in profile, the TOML file of that path, or ``here``: the calibrated."""
    if name == "here":
        name = str(default_path())
    if name in BUILT_IN:
        file = resources.files("natgrad_lab.simulate") / "profiles" / f"{name}.toml"
        return profile_from_dict(tomllib.loads(file.read_text(encoding="utf-8")))
    if not Path(name).is_file():
        legal = f"{', '.join(BUILT_IN)}, here, or a file that natgrad calibrate wrote"
        raise UserError(f"Unknown profile {name!r}. Must be one of {legal}.")
    return load_profile(name)
