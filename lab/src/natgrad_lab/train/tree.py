"""A nested state as tensors by path, and the rest as an outline in JSON.

Tensors leave the outline: what differs from rank to rank of a state are the tensors
that a rank holds, everything else is the same on all of them. `join` therefore needs
the outline of one rank and the tensors of all.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

Path = tuple[str, ...]
Nested = dict[str, Any]


class Rows:
    """A tensor that every rank has one of; together they are one, row by row.

    ``local`` has a leading dim; the ranks' are laid one after the other along it.
    """

    def __init__(self, local: Tensor) -> None:
        self.local = local


class _Absent:
    """A tensor's place before it is filled."""


ABSENT = _Absent()
TENSOR = {"$tensor": True}
LONGEST = 2**20
"""Items of a list: a wrong path must not fill the memory."""


def split(tree: Any) -> tuple[Nested, Any]:
    """Tensors (and `Rows`) as nested dicts, and an outline of everything in JSON."""
    tensors: Nested = {}
    outline = _split(tree, tensors)
    return tensors, outline


def _split(value: Any, tensors: Nested) -> Any:
    if isinstance(value, Mapping):
        pairs = [(key, _below(key, item, tensors)) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs):
            return dict(pairs)
        return {"$items": [list(pair) for pair in pairs]}
    if isinstance(value, list | tuple):
        items = [_below(i, item, tensors) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"Cannot save a {type(value).__name__}: {value!r}.")


def _below(key: Any, item: Any, tensors: Nested) -> Any:
    if isinstance(item, Tensor | Rows):
        tensors[str(key)] = item
        return TENSOR
    inner: Nested = {}
    outline = _split(item, inner)
    if inner:
        tensors[str(key)] = inner
    return outline


def leaves(outline: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all tensors of an outline."""
    if outline == TENSOR:
        yield path
    for key, item in _items(outline):
        yield from leaves(item, (*path, str(key)))


def join(outline: Any, tensors: Mapping[Path, Tensor]) -> Any:
    """Undo `split`. A tensor that is not given is None, and left out of lists.

    An outline that no `split` has made, or a path that leads nowhere, is a ValueError.
    """
    tree = _decode(outline)
    for path, tensor in sorted(tensors.items(), key=lambda pair: _order(pair[0])):
        _put(tree, path, tensor)
    return _swept(tree)


def _order(path: Path) -> tuple[tuple[int, str], ...]:
    """Numbers by value, so that lists grow from their start."""
    return tuple((int(key), "") if key.isdigit() else (-1, key) for key in path)


def _items(outline: Any) -> list[tuple[Any, Any]]:
    """What an outline's container holds; nothing if it is none."""
    if isinstance(outline, list):
        return list(enumerate(outline))
    if not isinstance(outline, dict) or outline == TENSOR:
        return []
    if set(outline) == {"$tuple"}:
        return _items(_listed(outline["$tuple"]))
    if set(outline) == {"$items"}:
        return [_pair(each) for each in _listed(outline["$items"])]
    return list(outline.items())


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"Invalid items {value!r}. Must be a list.")
    return value


def _pair(value: Any) -> tuple[Any, Any]:
    if isinstance(value, list) and len(value) == 2:
        key, item = value
        if key is None or isinstance(key, bool | int | float | str):
            return key, item
    raise ValueError(f"Invalid item {value!r}. Must be a key and a value.")


def _decode(value: Any) -> Any:
    if value == TENSOR:
        return ABSENT
    if not isinstance(value, list | dict):
        return value
    items = [(key, _decode(item)) for key, item in _items(value)]
    if isinstance(value, list):
        return [item for _, item in items]
    if set(value) == {"$tuple"}:
        return tuple(item for _, item in items)
    return dict(items)


def _put(tree: Any, path: Path, tensor: Tensor) -> None:
    """Set a leaf; containers that this outline does not have are made."""
    for key, following in pairwise(path):
        _require_container(tree, path)
        inner = _get(tree, key)
        if inner is None or inner is ABSENT:
            inner = [] if following.isdigit() else {}
            _set(tree, key, inner)
        tree = inner
    _require_container(tree, path)
    _set(tree, path[-1], tensor)


def _require_container(tree: Any, path: Path) -> None:
    if not isinstance(tree, list | dict):
        place = "/".join(path)
        raise ValueError(f"{place} leads into a {type(tree).__name__}, no container")


def _name(tree: Any, key: str) -> Any:
    if isinstance(tree, list):
        return int(key)
    return int(key) if key not in tree and key.isdigit() and int(key) in tree else key


def _get(tree: Any, key: str) -> Any:
    name = _name(tree, key)
    if isinstance(tree, list):
        return tree[name] if name < len(tree) else None
    return tree.get(name)


def _set(tree: Any, key: str, value: Any) -> None:
    name = _name(tree, key)
    if isinstance(tree, list):
        if not 0 <= name < LONGEST:
            raise ValueError(f"Invalid index {name} of a list. Must be < {LONGEST}.")
        tree.extend([ABSENT] * (name + 1 - len(tree)))
    tree[name] = value


def _swept(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {
            key: None if item is ABSENT else _swept(item) for key, item in tree.items()
        }
    if isinstance(tree, list | tuple):
        kept = [_swept(item) for item in tree if item is not ABSENT]
        return tuple(kept) if isinstance(tree, tuple) else kept
    return tree
