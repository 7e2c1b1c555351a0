"""Checkpoints of a run: written beside the training, whole or not at all.

``checkpoints/step-00000012`` is a checkpoint, ``checkpoints/latest`` names the newest.
One is written as ``step-00000012.partial`` and renamed when every rank's part is on
disk, so a crash at any moment leaves the ones before it as they were. State is keyed by
the names of parameters and statistics, never by rank: any number of ranks can load it.
"""

import itertools
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from natgrad_lab.errors import UserError
from natgrad_lab.train import tree
from natgrad_lab.train.files import sync_folder, write_whole
from natgrad_lab.train.manifest import MANIFEST, CheckpointError, read_manifest
from natgrad_lab.train.processes import World, is_connection
from natgrad_lab.train.storage import Reader, Writer

KEEP = 2
LATEST = "latest"
_NAME = re.compile(r"step-(\d{8})(?:\.(\d+))?")
_ALONE = "torch.distributed is disabled, unavailable or uninitialized"

Wanted = Callable[[tree.Path], bool]
Use = Callable[[dict[str, Any], int], None]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; seen by all ranks.
        world: this process among its peers.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self._folder, self._world = folder, world
        self._thread: threading.Thread | None = None
        self._problem, self._remark = "", ""
        # Its own group: a save's messages must not mix with those of training.
        self._group: Any = None
        self._mesh: Any = None
        # torch says this of every save and load without a process group
        warnings.filterwarnings("ignore", message=_ALONE)

    def save(self, step: int, state: dict[str, Any]) -> str:
        """Copy a state and start to write it. Collective.

        Returns what went wrong with the save before this one, or an empty text.
        """
        before = self.wait()
        tensors, outline = tree.split(state)
        staged = self._staged(tensors)
        facts = {"step": step, "world": self._world.size, "outline": outline}
        target = self._world.share(self._free_name(step) if self._world.main else "")
        if self._group is None:
            self._group = self._world.new_group()
        arguments = (target, facts, staged)
        self._thread = threading.Thread(
            target=self._write, args=arguments, name="checkpoint", daemon=True
        )
        self._thread.start()
        return before

    def wait(self) -> str:
        """Until nothing is being written; what went wrong, or an empty text.

        What went wrong only after a state was saved is a warning.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        if self._remark:
            warnings.warn(f"Checkpoint: {self._remark}.", stacklevel=2)
            self._remark = ""
        problem, self._problem = self._problem, ""
        return problem

    def any(self) -> bool:
        """Whether there is anything to load. Collective."""
        return self._world.any(self._world.main and bool(self._candidates()))

    def load(
        self, wanted: Wanted = lambda _: True, use: Use = lambda *_: None
    ) -> tuple[dict[str, Any], int]:
        """The newest state that every rank can read and use, and how many saved it.

        Older ones are a fallback, with a warning that says so. A tensor whose path is
        not ``wanted`` on this rank is not read. ``use`` is called with the state and
        the number of ranks that saved it; if it raises, the state is of no use.
        Collective.
        """
        problems: list[str] = []
        names = self._world.share("\n".join(self._candidates())).split()
        for name in names:
            try:
                loaded, problem = self._read(name, wanted), ""
            except CheckpointError as error:
                loaded, problem = None, str(error)
            problem = self._world.first(problem)
            if loaded is not None and not problem:
                problem = self._world.first(self._used(name, loaded, use))
            if loaded is not None and not problem:
                self._set_aside(names[: len(problems)], problems, name)
                return loaded
            problems.append(problem)
        lines = "".join(f"\n  {each}" for each in problems)
        raise UserError(
            f"No usable checkpoint in {self._folder}. Start the run over.{lines}"
        )

    def close(self) -> None:
        """Finish what is being written."""
        self.wait()
        self._world.drop_group(self._group)
        self._group = None

    # -- writing ----------------------------------------------------------------------

    def _staged(self, tensors: tree.Nested) -> tree.Nested:
        """Copies in main memory, which training cannot change any more."""
        staged: tree.Nested = {}
        for key, value in tensors.items():
            if isinstance(value, tree.Rows):
                self._mesh = self._mesh or self._world.mesh()
                staged[key] = self._world.rows(_copied(value.local), self._mesh)
            elif isinstance(value, Tensor):
                staged[key] = _copied(value)
            else:
                staged[key] = self._staged(value)
        return staged

    def _write(self, target: str, facts: dict[str, Any], staged: tree.Nested) -> None:
        partial = self._folder / f"{target}.partial"

        def commit() -> None:
            partial.rename(self._folder / target)
            try:
                write_whole(self._folder / LATEST, target)
                sync_folder(self._folder)
                self._prune()
            except OSError as error:  # loading does not need what is missing now
                self._remark = f"{target} is saved, but after that: {_reason(error)}"
                (self._folder / f"{LATEST}.partial").unlink(missing_ok=True)

        try:
            dcp.save(
                staged,
                storage_writer=Writer(partial, facts, commit),
                process_group=self._group,
                no_dist=self._world.size == 1,
            )
        # a full disk raises almost anything, and torch's own is no Exception
        except (Exception, dcp.CheckpointException) as error:
            self._problem = f"step {facts['step']} is not saved: {_reason(error)}"
            if self._world.main:
                shutil.rmtree(partial, ignore_errors=True)

    def _free_name(self, step: int) -> str:
        """A name that is not taken: a checkpoint is never overwritten."""
        return self._unused(f"step-{step:08d}")

    def _unused(self, name: str) -> str:
        tries = (f"{name}.{i}" for i in itertools.count(1))
        taken = lambda x: (self._folder / x).exists()  # noqa: E731
        return next(x for x in itertools.chain([name], tries) if not taken(x))

    def _prune(self) -> None:
        for name in self._candidates()[KEEP:]:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    # -- reading ----------------------------------------------------------------------

    def _candidates(self) -> list[str]:
        """Names of checkpoints, newest first."""
        if not self._folder.is_dir():
            return []
        found = [m for p in self._folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        found.sort(key=lambda m: (int(m[1]), int(m[2] or 0)), reverse=True)
        return [match[0] for match in found]

    def _read(self, name: str, wanted: Wanted) -> tuple[dict[str, Any], int]:
        """A state and the number of ranks that saved it."""
        manifest = read_manifest(self._folder / name)
        tensors = {k: each for k, each in manifest.tensors.items() if wanted(each.path)}
        reader = Reader(self._folder / name, tensors)
        reader.require_files()
        state = {
            key: torch.empty(each.size, dtype=each.torch_dtype)
            for key, each in tensors.items()
        }
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        try:
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
        except dcp.CheckpointException as error:
            raise CheckpointError(_reason(error)) from error
        state |= reader.whole
        paths = {tensors[key].path: state[key] for key in state}
        try:
            loaded = tree.join(manifest.outline, paths)
        except (ValueError, RecursionError) as error:
            told = f"{self._folder / name / MANIFEST} is damaged: {error}"
            raise CheckpointError(told) from error
        return {**loaded, "step": manifest.step}, manifest.world

    def _used(self, name: str, loaded: tuple[dict[str, Any], int], use: Use) -> str:
        """What a state that could be read is not used for, or an empty text."""
        try:
            use(*loaded)
        # a state that another program made may have anything in any place
        except (UserError, ValueError, LookupError, TypeError, AttributeError) as error:
            told = str(error) if isinstance(error, UserError) else _reason(error)
            return f"{self._folder / name} does not fit: {told}"
        except RuntimeError as error:
            if is_connection(error):
                raise
            return f"{self._folder / name} does not fit: {_reason(error)}"
        return ""

    def _set_aside(self, names: list[str], problems: list[str], used: str) -> None:
        """Say what was skipped; out of the way, it is not tried or counted again."""
        for name, problem in zip(names, problems, strict=True):
            if self._world.main:
                aside = self._unused(f"{name}.broken")
                (self._folder / name).rename(self._folder / aside)
                warnings.warn(
                    f"Skipped a checkpoint: {problem}. Used {used} instead; the other "
                    f"is now {aside}.",
                    stacklevel=3,
                )


def _copied(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)


def _reason(error: BaseException) -> str:
    """The first line of what really happened, on whichever rank.

    All lines if the first ends with a colon: the others are what it is about.
    """
    if isinstance(error, dcp.CheckpointException):
        rank, (inner, _) = next(iter(error.failures.items()))
        if isinstance(inner, CheckpointError):
            return str(inner)
        return f"{_reason(inner)} (rank {rank})"
    lines = str(error).splitlines() or [""]
    count = len(lines) if lines[0].endswith(":") else 1
    told = " ".join(line.strip() for line in lines[:count])
    return f"{type(error).__name__}: {told}"
