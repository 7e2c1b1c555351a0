"""Whether all ranks train the same model in the same way.

Note [Equal on all ranks]
Each rank computes a part of an update, or all of it, by its own settings and from its
own weights: if those differ, ranks diverge without an error. So everything that decides
an update is compared. Options are at construction. What may change later (learning
rates, momentum, weight decay and whatever else parameter groups have, damping and
intervals at this step, the step itself) travels with each step's agreement as a digest,
and so do the bits of all weights every ``check_weights`` steps. The agreement is a sum
over ranks, so a digest d of 20 bits is sent as d and d * d, which float64 adds without
rounding: n numbers are equal just when n times the sum of their squares is the square
of their sum. Only if they are not do ranks tell each other more, to say what differs.
Under DDP a block that has a gradient on some ranks only would move there only: that is
known from the same sum.
"""

import dataclasses
import hashlib
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.distributed.communicator import Communicator
from natgrad.distributed.compare import differences
from natgrad.engine.agreement import Verdict
from natgrad.factors.averages import damping_at
from natgrad.factors.refresh import Timing
from natgrad.options import Options
from natgrad.rules.parts import Parts

BITS = 20
TOLERANCE = 1e-4
"""Relative to its norm: by how much a weight may differ between ranks. Different GPUs
round differently, which is told but is no error."""
LISTED = 5
Size = tuple[float, float]
_LOCAL = ("group", "profile", "comm")
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Replicas:
    """Compares settings and weights between ranks. See Note [Equal on all ranks].

    Args:
        model: the model, unwrapped.
        options: what was chosen at construction.
        updates: what the updates of the parameter groups are made of.
        optimizer: whose parameter groups decide the update, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        updates: Sequence[Parts],
        optimizer: Optimizer | None,
    ) -> None:
        self._model, self._options, self._optimizer = model, options, optimizer
        self._updates = updates
        self._warned = False

    def fingerprint(self) -> dict[str, str]:
        """Options by name, as texts that are equal where the same ones were given.

        Functions have the same text if they have the same name: what they return is
        compared in each step.
        """
        names = [f.name for f in dataclasses.fields(self._options)]
        given = {n: getattr(self._options, n) for n in names if n not in _LOCAL}
        usual = self._options.parts()
        for i, parts in enumerate(self._updates):
            given[f"update {i}"] = parts if parts != usual else "of the options"
        given["optimizer"] = type(self._optimizer).__name__
        texts = {n: re.sub(r" at 0x[0-9a-f]+", "", repr(x)) for n, x in given.items()}
        known = {id(p): name for name, p in self._model.named_parameters()}
        for i, group in enumerate(self._groups):
            inside = sorted(known.get(id(p), "?") for p in group["params"])
            texts[f"parameters of group {i}"] = ", ".join(inside)
        return texts

    def digests(self, step: int, comm: Communicator) -> list[int]:
        """Of settings and of weights; 0 for what is not compared in this step."""
        if comm.world == 1:
            return []
        every = comm.options.check_weights
        due = every is not None and step > 0 and step % every == 0
        weights = _digest((step, *self._sums().values())) if due else 0
        return [_digest(self._settings(step)), weights]

    def require(
        self,
        step: int,
        verdict: Verdict,
        held: Mapping[str, bool] | None,
        comm: Communicator,
    ) -> None:
        """Raise one error on all ranks, which names what differs.

        ``held`` says which blocks have a gradient here, where that must be the same.
        """
        if not all(verdict.same[:1]):
            self._refuse_settings(step, comm)
        if not all(verdict.same):
            self._judge(step, comm.tell((self._sums(), self._sizes())), comm.rank)
        if held is not None:
            self._require_gradients(verdict.gradients, held, comm)

    def _refuse_settings(self, step: int, comm: Communicator) -> None:
        said = comm.tell({name: repr(x) for name, x in self._settings(step).items()})
        lines = "\n".join(differences(said))
        raise ValueError(
            f"Ranks have different settings in step {step}:\n{lines}\nMust be the "
            "same: change a learning rate, a schedule or a group on all ranks."
        )

    def _require_gradients(
        self, counts: Mapping[str, int], held: Mapping[str, bool], comm: Communicator
    ) -> None:
        part = [n for n, count in counts.items() if 0 < count < comm.world]
        part = [n for n in part if not any(_is_in(p, n) for p in self._ignored)]
        if part:
            said = comm.tell({n: "there" if held[n] else "None" for n in part})
            lines = "\n".join(differences(said))
            raise ValueError(
                f"Blocks have a gradient on some ranks only:\n{lines}\nMust be on all "
                "or none, as DistributedDataParallel leaves it: weights would differ."
            )

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    @property
    def _ignored(self) -> Collection[str]:
        """Parameters that DDP was told to leave alone."""
        return getattr(self._model, "_ddp_params_and_buffers_to_ignore", ())

    def _settings(self, step: int) -> dict[str, Any]:
        """All that decides an update and may change, by name."""
        found: dict[str, Any] = {"step": step}
        for i, parts in enumerate(self._updates):
            of = f" of update {i}" if len(self._updates) > 1 else ""
            refresh = parts.refresh
            found[f"damping{of}"] = damping_at(parts.damping, step)
            found[f"next statistics{of}"] = refresh.after_statistic(step, Timing())
            found[f"next inverses{of}"] = refresh.after_inverse(step, Timing())
        for i, group in enumerate(self._groups):
            for name, value in group.items():
                plain = len(value) if name == "params" else _plain(value)
                if plain is not ...:
                    found[f"{name} of group {i}"] = plain
        return found

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Those that are to be the same on all ranks: no shards, no rank's own."""
        for name, p in self._model.named_parameters():
            whole = p.layout == torch.strided and type(p.data) is Tensor
            if whole and p.numel() and name not in self._ignored:
                yield name, p.detach()

    def _sums(self) -> dict[str, Any]:
        """A sum of the bits of each weight: whole numbers, so in any order the same."""
        named = list(self._weights())
        if not named:
            return {}
        sums = [_sum_of_bits(x) for _, x in named]
        found = torch.stack([x.to(sums[0].device) for x in sums]).tolist()
        return {name: bits for (name, _), bits in zip(named, found, strict=True)}

    def _sizes(self) -> dict[str, Size]:
        """The sum and the norm of each weight."""
        sums = {n: float(x.sum(dtype=torch.float64)) for n, x in self._weights()}
        return {n: (sums[n], float(x.double().norm())) for n, x in self._weights()}

    def _judge(self, step: int, said: list[Any], rank: int) -> None:
        """Raise, or warn if it may be rounding, of the weights that differ."""
        lines: list[tuple[float, str]] = []
        for name in said[0][0]:
            ranks: dict[int | None, list[int]] = defaultdict(list)
            for r, (sums, _) in enumerate(said):
                ranks[sums.get(name)].append(r)
            if len(ranks) > 1:
                away = _spread([sizes.get(name) for _, sizes in said])
                who = " and ".join(f"ranks {some}" for some in ranks.values())
                lines.append((away, f"  {name}: {who}, by {away:.1e} of its norm"))
        lines.sort(reverse=True)
        told = [line for _, line in lines[:LISTED]]
        told += [f"  and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
        text = "\n".join([f"Weights differ between ranks in step {step}:", *told])
        if not all(away <= TOLERANCE for away, _ in lines):
            raise ValueError(
                f"{text}\nMust be the same. Were they changed, loaded or trained on "
                "some ranks only?"
            )
        if rank == 0 and not self._warned and any(away for away, _ in lines):
            self._warned = True
            warnings.warn(f"{text}\nThis may be rounding.", stacklevel=6)


def _digest(value: Any) -> int:
    found = hashlib.blake2b(repr(value).encode(), digest_size=4).digest()
    return int.from_bytes(found, "little") % 2**BITS


def _plain(value: Any) -> Any:
    """Numbers, texts and tuples of them; ... for anything else."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else ...
    if isinstance(value, list | tuple):
        parts = tuple(map(_plain, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return ... if ... in parts else parts
    if isinstance(value, dict):
        return _plain(list(value.items()))  # pyright: ignore[reportUnknownArgumentType]
    return value if isinstance(value, int | float | str | None) else ...


def _sum_of_bits(x: Tensor) -> Tensor:
    if x.is_contiguous() and x.nbytes % 8 == 0 and x.data_ptr() % 8 == 0:
        flat = x.flatten()
        offset = flat.storage_offset() * flat.element_size()
        if offset % 8 == 0:
            return flat.view(torch.int64).sum()
    return x.view(_INTEGERS[x.element_size()]).sum(dtype=torch.int64)


def _spread(sizes: Sequence[Size | None]) -> float:
    """By how much sums and norms differ, relative to the largest norm."""
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return math.inf
    norm = max(norm for _, norm in known) or 1.0
    return max(max(column) - min(column) for column in zip(*known, strict=True)) / norm


def _is_in(parameter: str, block: str) -> bool:
    return parameter == block or parameter.rpartition(".")[0] == block
