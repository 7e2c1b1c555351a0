"""The files of a checkpoint: torch.distributed.checkpoint's, and a manifest.

A checkpoint is a folder:

- ``*.distcp``: tensors as torch.distributed.checkpoint writes them, a file a rank;
- ``.metadata``: torch's own index, for torch's tools. Never read here: it is a pickle;
- ``manifest.json``: our index. Where each tensor is, with checksums, and all that is
  not a tensor. JSON cannot run code, and tensors are read with ``weights_only=True``.
"""

import hashlib
import io
import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from natgrad_lab.train.files import sync_folder, write_whole

KIND = "natgrad checkpoint"
FORMAT = 2
MANIFEST = "manifest.json"


class CheckpointError(Exception):
    """A checkpoint cannot be used. The message names the file and what is wrong."""


@dataclass(frozen=True)
class _Checked:
    """Where torch put a tensor, and the checksum of its bytes there."""

    place: Any
    crc: int


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

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if is_coordinator:
            shutil.rmtree(self._folder, ignore_errors=True)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
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
        write_whole(self._folder / MANIFEST, _signed(content))
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


def _signed(content: dict[str, Any]) -> str:
    text = json.dumps(content)
    head = {"kind": KIND, "format": FORMAT, "digest": _digest(text)}
    return json.dumps({**head, "content": text})


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds. Raises `CheckpointError` on anything unexpected."""
    path = folder / MANIFEST
    if (folder / "rank-0.pt").is_file():
        raise CheckpointError(
            f"{folder} has format 1 (one file a rank). Must be format {FORMAT}: "
            "resume it with the natgrad that wrote it."
        )
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(head, dict) or head.get("kind") != KIND:
        raise CheckpointError(f"{path} is of another program. Must be a {KIND}.")
    if head.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {head.get('format')}. Must be format {FORMAT}."
        )
    content = head.get("content")
    if not isinstance(content, str) or _digest(content) != head.get("digest"):
        raise CheckpointError(f"{path} is damaged: its digest does not match")
    return json.loads(content)


class Reader(StorageReader):
    """Reads the files of a `Writer`, by a manifest that `read_manifest` returned.

    ``whole`` collects tensors that were stored in one piece just as they were stored:
    a copy would lose their strides, and a resumed run would then round differently.
    """

    def __init__(self, folder: Path, tensors: dict[str, Any]) -> None:
        self._folder, self._tensors = folder, tensors
        self.whole: dict[str, Tensor] = {}

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
            if piece.shape == torch.Size(self._tensors[item.dest_index.fqn]["size"]):
                self.whole[item.dest_index.fqn] = piece
            else:
                target.copy_(piece)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, index: MetadataIndex) -> Tensor:
        """A chunk as it was saved, checked."""
        chunks = self._tensors[index.fqn]["chunks"]
        chunk = next(c for c in chunks if torch.Size(c["offsets"]) == index.offset)
        path, place = self._folder / chunk["file"], _Place(**_only(chunk, _Place))
        try:
            content = _bytes_at(path, place)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if len(content) < place.length:
            raise CheckpointError(
                f"{path} is truncated: {index.fqn} ends at byte "
                f"{place.offset + place.length}"
            )
        if zlib.crc32(content) != chunk["crc32"]:
            raise CheckpointError(
                f"{path} is damaged: the checksum of {index.fqn} does not match"
            )
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return cast(Tensor, loaded)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return Path(checkpoint_id).is_dir()


@dataclass(frozen=True)
class _Place:
    offset: int
    length: int


def _only(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    return {name: values[name] for name in kind.__annotations__}


def _stored(each: dict[str, Any]) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"]))
        for c in each["chunks"]
    ]
    properties = TensorProperties(dtype=dtype_of(each))
    return TensorStorageMetadata(properties, torch.Size(each["size"]), chunks)


def dtype_of(each: dict[str, Any]) -> torch.dtype:
    """The dtype of an entry of the manifest."""
    found = getattr(torch, each["dtype"], None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"Unknown dtype {each['dtype']!r} in {MANIFEST}.")
    return found


def _bytes_at(path: Path, place: Any) -> bytes:
    with path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)
