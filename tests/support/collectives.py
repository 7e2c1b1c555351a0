"""A log of every collective that a rank starts: natgrad's, and torch's own."""

# pyright: reportPrivateUsage=false
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Start:
    """One collective: which, and among whom."""

    name: str
    ranks: tuple[int, ...]

    @property
    def place(self) -> tuple[str, int, int]:
        """What it is on every rank of a regular mesh: its size, and its stride."""
        first, *rest = self.ranks
        return self.name, len(self.ranks), rest[0] - first if rest else 0


class Collectives(TorchDispatchMode):
    """Collects what starts while it is active, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[Start] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs collectives of its own, which we then see
        kwargs = kwargs or {}
        if "c10d" in function.namespace:
            group = _group([*args, *kwargs.values()])
            if group is not None:
                ranks = tuple(dist.get_process_group_ranks(group))
                self.starts.append(Start(function.name(), ranks))
        return function(*args, **kwargs)


def _group(values: list[Any]) -> Any:
    """The group among an operation's arguments: itself, or its name as the last."""
    for value in values:
        if isinstance(value, torch.ScriptObject) and "Group" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    name: Any = values[-1]
    if not isinstance(name, str):
        return None
    find: Any = dist.distributed_c10d._resolve_process_group
    return find(name)
