"""Records what every block does, every so many steps: `watch` and `diagnostics`.

A look is one record: a dict of numbers, the same on all ranks. Spectra and changes come
from the rank that owns a statistic, norms and angles from the first that works on the
block; one small sum over ranks brings them together. Nothing that is measured changes
what training computes. What the numbers mean is said in ``docs/diagnostics.md``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from natgrad.diagnostics.timer import Reader, phase_sum
from natgrad.math import spectrum
from natgrad.math.parts import without_padding
from natgrad.math.spectrum import POINTS
from natgrad.plan import EXCHANGES

if TYPE_CHECKING:
    from natgrad.factors.state import StatisticState
    from natgrad.factors.statistics import Statistics
    from natgrad.layers import Block

Record = dict[str, Any]
Sink = Callable[[Record], None]
Told = dict[tuple[str, str], Tensor]
"""Numbers by what they are of: "statistic" or "block" and its name, or all together."""

SAMPLE = 1000
PHASES = ("estimate", "sampled", "reduce", "refresh", "invert", "precondition")
TIMES = (*PHASES, "step", "gradients", "update")
SUMMARY = 4 + POINTS
STATISTIC = ("change", "estimate", "invert", "bytes")
BLOCK = ("gradient", "update", "product", "moved", "weight", "precondition")


class Probe:
    """Looks at blocks and their statistics every ``every`` steps.

    Args:
        statistics: what to look at.
        every: steps between looks; the first step is looked at.
        rates: gives the learning rate, and what is found beside it.
        sink: called with each record on rank 0.
    """

    def __init__(
        self,
        statistics: "Statistics",
        every: int,
        rates: Callable[[], dict[str, float]],
        sink: Sink | None = None,
    ) -> None:
        self.statistics = statistics
        self.every = every
        self.sink = sink
        self.record: Record = {}
        self._rates = rates
        meter = statistics.meter
        self._reader, self._since = Reader(meter), meter.clock()
        self._last = statistics.step - 1
        self._before = self._counts()
        self._sent = self._traffic()
        self._weights: dict[str, Tensor] = {}
        self._known: dict[str, tuple[tuple[int, int], Tensor]] = {}
        self._norms: dict[str, Tensor] = {}
        if statistics.changes is None:
            statistics.changes = {}

    @property
    def looks(self) -> bool:
        """Whether the step that is running is one to look at."""
        return self.statistics.step % self.every == 0

    def note(
        self, gradients: Mapping[str, Tensor], updates: Mapping[str, Tensor]
    ) -> None:
        """Norms of gradients and updates, and their products, of blocks worked on."""
        if not self.looks:
            return
        for name, update in updates.items():
            g, u = gradients[name].flatten(), update.flatten()
            norms = (torch.linalg.vector_norm(g), torch.linalg.vector_norm(u))
            self._norms[name] = torch.stack((*norms, torch.dot(g, u))).double()

    @torch.no_grad()
    def finish(self) -> None:
        """At the end of a step: make a record of it if it is one to look at."""
        if not self.looks:
            return
        comm, now = self.statistics.comm, self.statistics.meter.clock()
        told = self._tell(now)
        flat = torch.cat(list(told.values()))
        total = comm.agree(flat) if comm.world > 1 else flat
        sums = total.cpu().split([len(x) for x in told.values()])
        self.record = self._assemble(dict(zip(told, sums, strict=True)))
        self._norms, self._since, self._last = {}, now, self.statistics.step
        self._before, self._sent = self._counts(), self._traffic()
        if self.sink is not None and comm.rank == 0:
            self.sink(self.record)

    # -- what this rank knows ---------------------------------------------------------

    def _tell(self, now: float) -> Told:
        """This rank's part of each number: a look is their sums over ranks."""
        all_of, seconds, sent = self.statistics, self._reader.take(), self._traffic()
        numbers = partial(all_of.like.new_tensor, dtype=torch.float64)
        spent = [now - self._since, *(phase_sum(seconds, phase) for phase in TIMES)]
        moved = [sent[name] - self._sent[name] for name in EXCHANGES]
        told: Told = {("seconds", ""): numbers(spent), ("sent", ""): numbers(moved)}
        for name, s in all_of.states.items():
            times = [seconds.get((phase, name), 0.0) for phase in STATISTIC[1:3]]
            row = numbers([0.0] * (SUMMARY + 1) + [*times, s.bytes()])
            if all_of.owns(s):
                row[:SUMMARY] = self._spectrum(s)
                row[SUMMARY] = (all_of.changes or {}).get(name, 0.0)
            told["statistic", name] = row
        for name, block in all_of.block.items():
            applied = numbers([seconds.get(("precondition", name), 0.0)])
            told["block", name] = torch.cat((self._motion(block), applied))
        return told

    def _spectrum(self, s: "StatisticState") -> Tensor:
        """Computed only for what was refreshed since the last look."""
        statistics, version = self.statistics, (s.timing.refreshed, 0)
        if statistics.is_eigen(s) and s.inverse is not None:
            version = (0, s.timing.inverted)
        elif s.average is None:
            return statistics.like.new_zeros(SUMMARY, dtype=torch.float64)
        kept = self._known.get(s.spec.name)
        if kept is None or kept[0] != version:
            # the eigenvalues (s, n) of a decomposition are there already
            x = s.inverse[1] if version[1] and s.inverse else statistics.dense(s)
            pieces = without_padding(x, s.spec.parts, s.spec.padding)
            summary = spectrum.summarise(*pieces).double()
            kept = self._known[s.spec.name] = version, summary
        return kept[1]

    def _motion(self, block: "Block") -> Tensor:
        """Norms, and how far a sample of the weights went since the last look."""
        plan, comm = self.statistics.plan, self.statistics.comm
        first = plan.workers[block.name][0] == comm.rank
        result = self.statistics.like.new_zeros(len(BLOCK) - 1, dtype=torch.float64)
        if not first:
            return result
        if block.name in self._norms:
            result[:3] = self._norms[block.name]
        flat = block.parameters[0].detach().flatten()
        sample = flat[:: -(-flat.numel() // SAMPLE)].double()
        old, self._weights[block.name] = self._weights.get(block.name), sample.clone()
        result[3] = math.nan if old is None else torch.linalg.vector_norm(sample - old)
        result[4] = torch.linalg.vector_norm(sample)
        return result

    def _counts(self) -> dict[str, tuple[int, int]]:
        states = self.statistics.states.items()
        return {name: (s.timing.refreshed, s.timing.inverted) for name, s in states}

    def _traffic(self) -> dict[str, int]:
        total = self.statistics.comm.traffic()["total"]
        return {name: total.get(name, {"sent": 0})["sent"] for name in EXCHANGES}

    # -- what all ranks know ----------------------------------------------------------

    def _assemble(self, told: Told) -> Record:
        all_of = self.statistics
        steps, world = all_of.step - self._last, all_of.comm.world
        by_statistic = {name: told["statistic", name] for name in all_of.states}
        per_step = (told["seconds", ""] / world / steps).tolist()
        sent = (told["sent", ""] / steps).tolist()
        seconds = dict(zip(("all", *TIMES), per_step, strict=True))
        statistics = {n: self._statistic(n, row) for n, row in by_statistic.items()}
        kept = sum(s["bytes"] for s in statistics.values())
        blocks: dict[str, Record] = {}
        for name, block in all_of.block.items():
            # an S is the spectrum of the whole block in other words, and no factor
            specs = [s for s in block.spec.statistics if s.kind != "S"]
            parts = [(statistics[s.name], by_statistic[s.name]) for s in specs]
            values: list[float] = told["block", name].tolist()
            found: dict[str, float] = dict(zip(BLOCK, values, strict=True))
            blocks[name] = {
                **self._curvature(name, parts),
                **self._step(found),
                **self._shares(name, found, by_statistic, steps, seconds["all"], kept),
            }
        account = all_of.account
        record: Record = {
            "step": all_of.step,
            "steps": steps,
            "world": world,
            **self._rates(),
            "seconds": seconds,
            "traffic": dict(zip(EXCHANGES, sent, strict=True)),
            "kl": sum(b["kl"] for b in blocks.values() if math.isfinite(b["kl"])),
            "blocks": blocks,
            "statistics": statistics,
        }
        if account is not None:
            record["budget"] = account.summary()
        return _finite(record)

    def _statistic(self, name: str, row: Tensor) -> Record:
        s, step = self.statistics.states[name], self.statistics.step
        largest, smallest, mean, square = row[:4].tolist()
        change, *_, kept = row[SUMMARY:].tolist()
        t, before = s.timing, self._before[name]
        size = s.spec.eigenvalues
        return {
            "kind": s.spec.kind,
            "size": size,
            "largest": largest,
            "median": float(row[4 + POINTS // 2]),
            "smallest": smallest,
            "effective_rank": spectrum.effective_rank(mean, square, size),
            "change": change if t.refreshed > 1 else math.nan,
            "age": step - t.refreshed_at if t.refreshed else math.nan,
            "inverse_age": step - t.inverted_at if t.inverted else math.nan,
            "next": t.statistics_at - step,
            "refreshed": t.refreshed - before[0],
            "inverted": t.inverted - before[1],
            "packed_bytes": s.spec.packed * self.statistics.like.element_size(),
            "bytes": int(kept),
        }

    def _curvature(self, name: str, parts: list[tuple[Record, Tensor]]) -> Record:
        """The block's spectrum: products of its factors' eigenvalues."""
        if not parts:
            return {}
        damping = self._damping(name)
        points = [row[4 : 4 + POINTS] for _, row in parts]
        right, left = (*points, torch.ones(1, dtype=points[0].dtype))[:2]
        found = [s for s, _ in parts]
        largest = math.prod(s["largest"] for s in found)
        smallest = math.prod(s["smallest"] for s in found)
        least = smallest + damping
        return {
            "largest": largest,
            "median": spectrum.product_quantile(right, left),
            "smallest": smallest,
            "effective_rank": math.prod(s["effective_rank"] for s in found),
            "size": self.statistics.block[name].spec.elements,
            "condition": (largest + damping) / least if least else math.inf,
            "damping": damping,
            "damping_ratio": damping / largest if largest else math.nan,
            "above_damping": math.nan
            if math.isnan(damping)
            else spectrum.share_above(right, left, damping),
            "age": _largest(found, "age"),
            "inverse_age": _largest(found, "inverse_age"),
            "next": min(s["next"] for s in found),
            "change": _largest(found, "change"),
        }

    def _damping(self, name: str) -> float:
        """What is added where a block has no curvature: mostly lambda itself.

        NaN for an ``"adaptive"`` rule, which adds to roots of second moments.
        """
        statistics, block = self.statistics, self.statistics.block[name]
        states = [statistics.states[s.name] for s in block.spec.statistics]
        if block.rule.adapts:
            return math.nan
        if not statistics.is_eigen(states[0]):
            return math.prod(statistics.factor_damping(s) for s in states)
        damping = statistics.damping_of(block)
        if block.rule.style == "relative":
            return damping * _mean_curvature(states)
        return damping

    def _step(self, found: Mapping[str, float]) -> Record:
        gradient, update, product = (found[k] for k in BLOCK[:3])
        norms = torch.tensor((product, gradient, update), dtype=torch.float64)
        moved = found["moved"] / found["weight"] if found["weight"] else math.nan
        return {
            "gradient_norm": gradient,
            "norm_ratio": update / gradient if gradient else math.nan,
            "angle": float(spectrum.angle(*norms)) if gradient else math.nan,
            "kl": self._rates()["lr"] ** 2 * abs(product),
            "motion": moved,
        }

    def _shares(
        self,
        name: str,
        found: Mapping[str, float],
        rows: Mapping[str, Tensor],
        steps: int,
        step_seconds: float,
        kept: int,
    ) -> Record:
        """A step's seconds and bytes: estimates by rank, inversions by owner."""
        statistics = self.statistics
        world, workers = statistics.comm.world, statistics.plan.workers[name]
        seconds = found["precondition"] / len(workers)
        held = 0.0
        specs = statistics.block[name].spec.statistics
        for spec in specs:
            _, estimate, invert, size = rows[spec.name][SUMMARY:].tolist()
            seconds += estimate / world + invert
            held += size
        seconds /= steps
        return {
            "seconds": seconds,
            "time_share": seconds / step_seconds if step_seconds else math.nan,
            "bytes": held,
            "bytes_share": held / kept if kept else 0.0,
            "bytes_moved": self._moved(name) / steps,
        }

    def _moved(self, name: str) -> int:
        """Bytes on the links since the last look, all ranks together, as planned."""
        all_of, steps = self.statistics, self.statistics.step - self._last
        times = {"reduce_gradients": {name: steps}, "share_updates": {name: steps}}
        times |= {"reduce_statistics": {}, "share_inverses": {}}
        for spec in all_of.block[name].spec.statistics:
            t, before = all_of.states[spec.name].timing, self._before
            times["reduce_statistics"][spec.name] = t.refreshed - before[spec.name][0]
            times["share_inverses"][spec.name] = t.inverted - before[spec.name][1]
        total = 0
        for exchange, counts in times.items():
            wire = all_of.comm.options.wire_dtype(exchange, all_of.like.dtype)
            size = torch.empty((), dtype=wire).element_size()
            planned = all_of.plan.exchanges[exchange]
            total += sum(n * size * planned.wire([k]) for k, n in counts.items())
        return total


def _mean_curvature(states: "Sequence[StatisticState]") -> float:
    """What a relative damping of EKFAC is relative to: S, or the factors before it."""
    *factors, scale = states
    if scale.inverse is not None:
        return scale.mean_eigenvalue
    return math.prod(s.mean_eigenvalue for s in factors)


def _largest(found: list[Record], key: str) -> float:
    values = [s[key] for s in found if not math.isnan(s[key])]
    return max(values, default=math.nan)


def _finite(tree: Any) -> Any:
    """What is not finite as None, which JSON has."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}  # pyright: ignore
    if isinstance(tree, float) and not math.isfinite(tree):
        return None
    return tree
