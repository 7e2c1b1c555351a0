"""The files of a checkpoint: torch.distributed.checkpoint's, and a manifest.

A checkpoint is a folder:

- ``*.distcp``: tensors as torch.distributed.checkpoint writes them, a file a rank;
- ``.metadata``: torch's own index, for torch's tools. Never read here: it is a pickle;
- ``manifest.json``: our index. Where each tensor is, with checksums, and all that is
  not a tensor. JSON cannot run code, and tensors are read with ``weights_only=True``.
"""

import io
import os
import shutil
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from natgrad_lab.train.files import sync_folder, write_whole
from natgrad_lab.train.manifest import (
    MANIFEST,
    CheckpointError,
    Chunk,
    Entry,
    signed,
)


@dataclass(frozen=True)
class _Checked:
    """Where torch put a tensor, and the checksum of its bytes there."""

    place: Any
    crc: int


class _Files(FileSystem):
    """Knows why a file could not be written: torch says only that it could not."""

    def __init__(self) -> None:
        self.failures: list[OSError] = []

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with io.BufferedWriter(_File(path, self.failures)) as stream:
            yield stream


class _File(io.FileIO):
    def __init__(self, path: str | os.PathLike[str], failures: list[OSError]) -> None:
        super().__init__(path, "wb")
        self._failures = failures

    def write(self, b: Any) -> int:
        try:
            return super().write(b)
        except OSError as error:
            self._failures.append(error)
            raise


class Writer(FileSystemWriter):
    """Writes a checkpoint's files into a folder, and commits when all ranks have.

    Args:
        folder: a temporary one; anything in it is removed first.
        facts: what else the manifest says: step, world and outline.
        commit: called on one rank when everything is on disk.
    """

    def __init__(
        self, folder: Path, facts: dict[str, Any], commit: Callable[[], None]
    ) -> None:
        super().__init__(folder, overwrite=True)
        self._folder, self._facts, self._commit = folder, facts, commit
        self.fs = self._files = _Files()

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if is_coordinator:
            shutil.rmtree(self._folder, ignore_errors=True)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner).wait()
        except Exception as error:
            raise self._files.failures[0] if self._files.failures else error from error
        checked: Future[list[WriteResult]] = Future()
        checked.set_result([self._checked(result) for result in written])
        return checked

    def _checked(self, result: WriteResult) -> WriteResult:
        place = result.storage_data
        content = _bytes_at(self._folder / place.relative_path, place)
        return replace(result, storage_data=_Checked(place, zlib.crc32(content)))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        everything = [result for part in results for result in part]
        chunks = {x.index: x.storage_data for x in everything}
        plain = [replace(x, storage_data=x.storage_data.place) for x in everything]
        super().finish(metadata, [plain])
        content = {**self._facts, "tensors": _index(metadata, chunks)}
        write_whole(self._folder / MANIFEST, signed(content))
        sync_folder(self._folder)
        self._commit()


def _index(metadata: Metadata, chunks: Mapping[MetadataIndex, Any]) -> dict[str, Any]:
    """The manifest's list of tensors: path, dtype, size, and where each chunk is."""
    index: dict[str, Any] = {}
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        index[key] = {
            "path": list(metadata.planner_data[key]),
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "size": list(tensor.size),
            "chunks": [_chunk(key, chunk, chunks) for chunk in tensor.chunks],
        }
    return index


def _chunk(
    key: str, chunk: ChunkStorageMetadata, chunks: Mapping[MetadataIndex, Any]
) -> dict[str, Any]:
    checked = chunks[MetadataIndex(key, chunk.offsets)]
    return {
        "offsets": list(chunk.offsets),
        "sizes": list(chunk.sizes),
        "file": checked.place.relative_path,
        "offset": checked.place.offset,
        "length": checked.place.length,
        "crc32": checked.crc,
    }


class Reader(StorageReader):
    """Reads the files of a `Writer`, by entries that `read_manifest` returned.

    ``whole`` collects tensors that were stored in one piece just as they were stored:
    a copy would lose their strides, and a resumed run would then round differently.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Entry]) -> None:
        self._folder, self._tensors = folder, tensors
        self.whole: dict[str, Tensor] = {}

    def require_files(self) -> None:
        """Raise if the files are too short, before memory is set aside for tensors."""
        sizes: dict[str, int] = {}
        for key, entry in self._tensors.items():
            for chunk in entry.chunks:
                path, end = self._folder / chunk.file, chunk.offset + chunk.length
                if chunk.file not in sizes:
                    sizes[chunk.file] = _size(path)
                if sizes[chunk.file] < end:
                    raise CheckpointError(
                        f"{path} is truncated: {key} ends at byte {end}"
                    )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({key: _stored(each) for key, each in self._tensors.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            piece = self._piece(item.storage_index)
            target = planner.resolve_tensor(item).detach()
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                piece = piece.narrow(dim, start, length)
            if tuple(piece.shape) == self._tensors[item.dest_index.fqn].size:
                self.whole[item.dest_index.fqn] = piece
            else:
                target.copy_(piece)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, index: MetadataIndex) -> Tensor:
        """A chunk as it was saved, checked."""
        entry = self._tensors[index.fqn]
        chunk = next(c for c in entry.chunks if torch.Size(c.offsets) == index.offset)
        path = self._folder / chunk.file
        try:
            content = _bytes_at(path, chunk)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if zlib.crc32(content) != chunk.crc32:
            raise CheckpointError(
                f"{path} is damaged: the checksum of {index.fqn} does not match"
            )
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not _is_a(loaded, chunk, entry):
            raise CheckpointError(
                f"{path} is damaged: {index.fqn} is not a tensor of size "
                f"{list(chunk.sizes)} and {entry.dtype}"
            )
        return loaded

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return Path(checkpoint_id).is_dir()


def _is_a(loaded: Any, chunk: Chunk, entry: Entry) -> bool:
    alike = isinstance(loaded, Tensor) and loaded.dtype == entry.torch_dtype
    return alike and tuple(loaded.shape) == chunk.sizes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _stored(entry: Entry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
        for c in entry.chunks
    ]
    properties = TensorProperties(dtype=entry.torch_dtype)
    return TensorStorageMetadata(properties, torch.Size(entry.size), chunks)


def _bytes_at(path: Path, place: Any) -> bytes:
    with path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)
