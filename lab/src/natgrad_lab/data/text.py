"""Characters of a folder of text; by default, of Python's own standard library."""

import platform
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from natgrad_lab.data.dataset import Dataset
from natgrad_lab.data.folders import DataError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
SUFFIXES = (".txt", ".md", ".py", ".rst")
# installed packages and tests: not the library's own, or much the same lines over
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class TextSplit:
    """Consecutive blocks of characters; the label of each is the one after it.

    Args:
        tokens: character numbers, (length,) uint8.
        block: characters in an example.
    """

    tokens: Tensor
    block: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the blocks, (N, block) int64 each."""
        places = indices[:, None] * self.block + torch.arange(self.block + 1)
        window = self.tokens[places].long()
        return window[:, :-1], window[:, 1:]


def load(
    root: Path, *, folder: str | Path | None = None, block: int = 128, limit: int = 127
) -> Dataset:
    """Every tenth file is for testing.

    Args:
        root: its folder `text` is read, if there is one.
        folder: text files to read instead (.txt, .md, .py, .rst, at any depth).
        block: characters in an example.
        limit: how many different characters are told apart; rarer ones are one.
    """
    if not 1 <= limit <= 255:
        raise ValueError(f"Invalid {limit=}. Must be in [1, 255].")
    paths, note = _sources(root, folder)
    test = set(paths[::10])
    train_text = _codes(p for p in paths if p not in test)
    test_text = _codes(p for p in paths if p in test)
    alphabet = _alphabet(train_text, limit)
    splits = [TextSplit(_encode(t, alphabet), block) for t in (train_text, test_text)]
    if not all(len(s) for s in splits):
        raise DataError(f"{note}: not enough text for examples of {block=}.")
    return Dataset(
        name="text",
        train=splits[0],
        test=splits[1],
        classes=(*map(chr, alphabet.tolist()), UNKNOWN),
        shape=(block,),
        note=note,
    )


def _sources(root: Path, folder: str | Path | None) -> tuple[list[Path], str]:
    own = Path(folder) if folder else root / "text"
    if folder or own.is_dir():
        files = sorted(p for p in own.rglob("*") if p.suffix in SUFFIXES)
        if len(files) < 2:
            raise DataError(f"{own} has no two text files ({', '.join(SUFFIXES)}).")
        return files, f"text of {own.name} ({len(files)} files)"
    library = Path(sysconfig.get_paths()["stdlib"])
    found = (p.relative_to(library) for p in library.rglob("*.py"))
    files = sorted(library / p for p in found if not EXCLUDED & set(p.parts))
    return files, f"Python {platform.python_version()} standard library"


def _codes(paths: Iterable[Path]) -> np.ndarray:
    """The code points of all files one after the other."""
    text = "\n".join(p.read_text(encoding="utf-8", errors="replace") for p in paths)
    return np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)


def _alphabet(codes: np.ndarray, limit: int) -> np.ndarray:
    """The `limit` most common code points, in increasing order."""
    counts = np.bincount(codes)
    counts[ord(UNKNOWN) :][:1] = 0  # it gets the last number in any case
    common = np.argsort(-counts, kind="stable")[:limit]
    return np.sort(common[counts[common] > 0])


def _encode(codes: np.ndarray, alphabet: np.ndarray) -> Tensor:
    """Places in the alphabet; what is not in it gets the number after the last."""
    table = np.full(0x110000, len(alphabet), np.uint8)
    table[alphabet] = np.arange(len(alphabet), dtype=np.uint8)
    return torch.from_numpy(table[codes])
