"""A checkpoint's own index, ``manifest.json``: signed, and parsed against a schema.

Nothing in it is believed: a number that does not fit the files beside it, a name that
leads elsewhere or a tensor without all its rows is a `CheckpointError`, and the
checkpoint before is used.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from natgrad_lab.schema import SchemaError, build
from natgrad_lab.train import tree

KIND = "natgrad checkpoint"
FORMAT = 2
MANIFEST = "manifest.json"
T = TypeVar("T")


class CheckpointError(Exception):
    """A checkpoint cannot be used. The message names the file and what is wrong."""


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(what)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some rows of a tensor, and where their bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int
    crc32: int

    def __post_init__(self) -> None:
        numbers = (*self.offsets, *self.sizes, self.offset, self.length, self.crc32)
        _require(min(numbers) >= 0, f"Invalid numbers {numbers}. Must be >= 0.")
        plain = Path(self.file).name == self.file and self.file not in ("", ".", "..")
        _require(plain, f"Invalid file={self.file!r}. Must be a name without a folder.")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor: where it is in the state, what it is, and its chunks."""

    path: tuple[str, ...]
    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        _require(bool(self.path), "Invalid path=(). Must not be empty.")
        _require(min(self.size, default=0) >= 0, f"Invalid size={self.size}.")
        known = isinstance(getattr(torch, self.dtype, None), torch.dtype)
        _require(known, f"Unknown dtype {self.dtype!r}.")
        bad = f"Its chunks do not make up a tensor of size {list(self.size)}."
        _require(self._complete(), bad)
        for chunk in self.chunks:
            least = math.prod(chunk.sizes) * self.torch_dtype.itemsize
            _require(least <= chunk.length, f"Its chunks have less than {least} bytes.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)

    def _complete(self) -> bool:
        """Whether the chunks are all its rows, each once."""
        if not self.size:
            return [(c.offsets, c.sizes) for c in self.chunks] == [((), ())]
        row = 0
        for chunk in sorted(self.chunks, key=lambda chunk: chunk.offsets):
            if chunk.offsets != (row, *[0] * (len(self.size) - 1)):
                return False
            if len(chunk.sizes) != len(self.size) or chunk.sizes[1:] != self.size[1:]:
                return False
            row += chunk.sizes[0]
        return row == self.size[0]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    world: int
    outline: dict[str, Any]
    tensors: dict[str, Entry]

    LIMIT: ClassVar[int] = 2**40

    def __post_init__(self) -> None:
        ok = 0 <= self.step < self.LIMIT
        _require(ok, f"Invalid step={self.step}. Must be in [0, {self.LIMIT}).")
        _require(self.world >= 1, f"Invalid world={self.world}. Must be >= 1.")
        there = {entry.path for entry in self.tensors.values()}
        for path in tree.leaves(self.outline):
            _require(path in there, f"It does not say where {'/'.join(path)} is.")


def signed(content: dict[str, Any] | str) -> str:
    """The file's text, for what a manifest says or for that as JSON."""
    text = content if isinstance(content, str) else json.dumps(content)
    head = {"kind": KIND, "format": FORMAT, "digest": _digest(text)}
    return json.dumps({**head, "content": text})


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint holds. Raises `CheckpointError` on anything unexpected."""
    path = folder / MANIFEST
    if (folder / "rank-0.pt").is_file():
        raise CheckpointError(
            f"{folder} has format 1 (one file a rank). Must be format {FORMAT}: "
            "resume it with the natgrad that wrote it."
        )
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    head = _undamaged(path, lambda: json.loads(text))
    if not isinstance(head, dict) or head.get("kind") != KIND:
        raise CheckpointError(f"{path} is of another program. Must be a {KIND}.")
    if head.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {head.get('format')}. Must be format {FORMAT}."
        )
    content = head.get("content")
    if not isinstance(content, str) or _digest(content) != head.get("digest"):
        raise CheckpointError(f"{path} is damaged: its digest does not match")
    return _undamaged(path, lambda: build(Manifest, json.loads(content)))


def _undamaged(path: Path, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except RecursionError as error:
        raise CheckpointError(f"{path} is damaged: it is nested too deeply") from error
    except (ValueError, SchemaError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
