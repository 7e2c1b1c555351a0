"""A run is a folder: config.json, versions.json, metrics.jsonl, checkpoints, curves.

versions.json has what the run depends on beside its settings, and what its data are.
"""

import dataclasses
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Collection
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from natgrad_lab.errors import UserError
from natgrad_lab.schema import SchemaError, build
from natgrad_lab.train.config import TrainConfig
from natgrad_lab.train.files import write_whole

PACKAGES = ("natgrad", "torch", "numpy", "scikit-learn", "pytorch_optimizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Where everything of one run is."""

    folder: Path
    name: str
    config: TrainConfig

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The records, one JSON object a line."""
        return self.folder / "metrics.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """What config.json holds."""

    recipe: str
    config: TrainConfig


class _Versions(TypedDict):
    """What is read of versions.json."""

    launch: NotRequired[str]
    data: NotRequired[str]


def launch() -> str:
    """What is the same in all restarts of one torchrun, and in no other; or nothing."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return ""
    # torchrun's default name is "none"; its process then tells launches apart
    return f"{socket.gethostname()}/{os.getppid()}" if name == "none" else name


def choose_folder(name: str, out: Path | None) -> Path:
    """The folder asked for, or a new one under runs/ that tells name and time.

    After a restart by torchrun, the folder that this launch has begun.
    """
    if out is not None:
        return out
    begun = [each for each in Path("runs").glob(f"{name}-*") if launched_here(each)]
    if begun:
        return max(begun, key=lambda each: each.name)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path("runs") / f"{name}-{stamp}"
    tries = 1
    while folder.exists():
        tries += 1
        folder = Path("runs") / f"{name}-{stamp}-{tries}"
    return folder


def launched_here(folder: Path) -> bool:
    """Whether a folder holds a run that an earlier start of this launch has made."""
    if not (launch() and (folder / "config.json").is_file()):
        return False
    try:
        return _read_versions(folder).get("launch") == launch()
    except UserError:  # nobody knows who made it
        return False


def require_free(folder: Path) -> None:
    """Raise if a folder holds a run."""
    if (folder / "config.json").exists():
        raise UserError(
            f"{folder} already holds a run. Continue it with "
            f"`natgrad train --resume {folder}`, or choose another --out."
        )


def create(folder: Path, name: str, config: TrainConfig) -> Run:
    """Make a run's folder and write down how it is made."""
    require_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"recipe": name, "config": plain(config)}
    _write_json(folder / "versions.json", versions())
    _write_json(folder / "config.json", settings)
    return Run(folder=folder, name=name, config=config)


def discard(folder: Path, keep: Collection[Path]) -> None:
    """Remove what a run that never did a step has put into its folder."""
    for each in folder.iterdir():
        if each in keep:
            continue
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)


def load(folder: Path) -> Run:
    """Open a run made by `create`."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a run: it has no config.json.")
    try:
        settings = build(_Settings, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError, SchemaError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return Run(folder=folder, name=settings.recipe, config=settings.config)


def note_data(run: Run, note: str) -> None:
    """Write down what a run's data really are (`Dataset.note`)."""
    try:
        kept = _read_versions(run.folder)
    except UserError as error:
        warnings.warn(f"{error} (written again)", stacklevel=2)
        kept = versions()
    if kept.get("data") != note:
        _write_json(run.folder / "versions.json", {**kept, "data": note})


def data_note(run: Run) -> str:
    """What to call a run's data beside its results; without a note, their name."""
    return _read_versions(run.folder).get("data") or run.config.data.name


def versions() -> dict[str, Any]:
    """What the run depends on: packages, Python, machine, git state, command."""
    import torch  # so late because commands that only read runs need none of it

    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "world": int(os.environ.get("WORLD_SIZE", "1")),
        "git": git_state(),
        "command": ["natgrad", *sys.argv[1:]],
        "launch": launch(),
    }


def git_state(*paths: str) -> dict[str, Any] | None:
    """Commit and whether files differ from it; None outside a repository.

    ``paths`` limits the files to those that git knows by such patterns.
    """
    here = Path(__file__).resolve().parent
    commit = _git(here, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    return {"commit": commit, "dirty": bool(changed)}


def plain(value: Any) -> Any:
    """A config as JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(x, getattr(value, x.name)) for x in dataclasses.fields(value)]
        return {x.name: plain(item) for x, item in pairs if not _left_out(x, item)}
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _left_out(field: dataclasses.Field[Any], value: Any) -> bool:
    """See `config.LATER`."""
    return bool(field.metadata.get("later")) and value == field.default


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _read_versions(folder: Path) -> dict[str, Any]:
    """versions.json, or nothing where it is missing."""
    path = folder / "versions.json"
    if not path.is_file():
        return {}
    try:
        return build(_Versions, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError, SchemaError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")
