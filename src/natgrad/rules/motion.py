"""How weights move by their updates: momentum (averages) and weight decay.

Momentum is kept of each parameter by the ranks that update it. A rank keeps the
*velocity*: the last change of a parameter, or the running average of its gradients.
Beside an average it keeps its *mass*: the sum of the weights that the gradients have in
it, which a parameter has its own of, because it may get its first gradient late, and
because momentum may change.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from natgrad.math import foreach
from natgrad.math.precondition import rescale_factor
from natgrad.math.products import sum_dtype
from natgrad.math.rules import averaged_noise
from natgrad.math.shards import local
from natgrad.math.statistics import widen
from natgrad.requiring import require_choice
from natgrad.rules.lengths import References, norms_here

if TYPE_CHECKING:
    from natgrad.layers import Block

VELOCITY, MASS = "velocity", "mass"


State = MutableMapping[Tensor, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Average:
    """What momentum is a running average of.

    Attributes:
        nesterov: look ahead: use the momentum that the next step will have.
    """

    keeps_mass: ClassVar[bool] = False

    nesterov: bool = False

    @property
    def has_newest(self) -> bool:
        """Whether a direction follows from the one of the step before (`newest`)."""
        return self.keeps_mass and not self.nesterov

    def velocity(self, state: State, p: Tensor) -> Tensor:
        """That of a parameter, at first zero; in float32 or better."""
        entry = state[p]
        if VELOCITY not in entry:
            entry[VELOCITY] = torch.zeros_like(widen(p))
            if self.keeps_mass:
                entry[MASS] = 0.0
        kept, wide = entry[VELOCITY], sum_dtype(p)
        if kept.dtype != wide or kept.device != p.device:  # the model was converted
            kept = entry[VELOCITY] = kept.to(p.device, wide)
        return local(kept)

    def keep_whole(self, state: State, p: Tensor, like: Tensor) -> None:
        """Keep the velocity of a parameter that is cut on the rank that works on it.

        ``like`` is a whole tensor of the parameter's shape.
        """
        if VELOCITY not in state[p]:
            state[p] |= {VELOCITY: torch.zeros_like(like, dtype=widen(p).dtype)}
            state[p] |= {MASS: 0.0} if self.keeps_mass else {}

    def directions(
        self,
        state: State,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
        momentum: float,
    ) -> Sequence[Tensor]:
        """What the rule is given, from the gradients of parameters."""
        return gradients

    def newest(self, state: State, p: Tensor, momentum: float) -> float | None:
        """The weight w of the newest gradient g in the direction of a parameter.

        The direction is ``(1 - w)`` times the one of the step before, plus ``w g``.
        None if it is not of that kind.
        """
        return None

    def noise(self, momentum: float) -> float:
        """What is left in a direction of gradients that are only noise, as a part."""
        return 1.0

    def move(
        self,
        state: State,
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
        lr: float,
        momentum: float,
    ) -> None:
        """Change the parameters by what the rule and the length gave."""
        raise NotImplementedError

    def follow(self, state: State, p: Tensor, change: Tensor) -> None:
        """Learn of a change of a parameter that was no update (a rescaling)."""


@dataclass(frozen=True, kw_only=True)
class AverageUpdates(Average):
    """Momentum after the rule: ``v <- momentum v - lr u``, ``w <- w + v``.

    As SP-NGD (eq. 23) and torch's SGD have it.
    """

    def move(
        self,
        state: State,
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
        lr: float,
        momentum: float,
    ) -> None:
        """eq. 23."""
        velocity = [self.velocity(state, p) for p in params]
        foreach.scale_(velocity, momentum)
        foreach.add_(velocity, updates, -lr)
        params = [local(p) for p in params]
        if self.nesterov:
            foreach.add_(params, velocity, momentum)
            foreach.add_(params, updates, -lr)
        else:
            foreach.add_(params, velocity)

    def follow(self, state: State, p: Tensor, change: Tensor) -> None:
        """The velocity is the last change of the parameter, whatever made it."""
        foreach.add_([self.velocity(state, p)], [change])


@dataclass(frozen=True, kw_only=True)
class AverageGradients(Average):
    """Momentum before the rule, as Muon and Adam have it.

    The average has no bias and weights that add up to 1, so that with momentum m a
    learning rate means 1 - m of what it means for `AverageUpdates`.
    """

    keeps_mass: ClassVar[bool] = True

    def directions(
        self,
        state: State,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
        momentum: float,
    ) -> Sequence[Tensor]:
        """Add gradients to their running averages; returns those, without bias."""
        m, velocity = momentum, [self.velocity(state, p) for p in params]
        foreach.lerp_(velocity, gradients, 1 - m)
        masses = list[float]()
        for p in params:
            entry = state[p]
            entry[MASS] = mass = m * entry[MASS] + 1 - m
            masses.append(mass)
        if not self.nesterov:
            return foreach.divided(velocity, masses)
        ahead = foreach.lerp(velocity, gradients, 1 - m)
        foreach.divide_(ahead, [m * mass + 1 - m for mass in masses])
        return ahead

    def newest(self, state: State, p: Tensor, momentum: float) -> float | None:
        """Without Nesterov's look-ahead: gradients count by their part of the mass."""
        return (1 - momentum) / state[p][MASS] if self.has_newest else None

    def noise(self, momentum: float) -> float:
        """That of a long average."""
        return averaged_noise(momentum, self.nesterov)

    def move(
        self,
        state: State,
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
        lr: float,
        momentum: float,
    ) -> None:
        """``w <- w - lr u``."""
        foreach.add_([local(p) for p in params], updates, -lr)


Moving = tuple[dict[str, Any], Average, list[Tensor], list[Tensor]]
"""A parameter group, an average, parameters, and a tensor for each of them."""


class Places:
    """In which parameter group the parameters of blocks are, and by which average.

    Of those that are ours. ``groups`` are the optimizer's at construction; each method
    gets them again, as they may be another list after a state was loaded.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        blocks: "Iterable[Block]",
        averages: Mapping[str, Average],
    ) -> None:
        numbers = {id(p): i for i, g in enumerate(groups) for p in g["params"]}
        kinds: dict[tuple[int, Average], int] = {}
        self._places: dict[str, list[tuple[Tensor, int]]] = {}
        for block in (b for b in blocks if not b.is_foreign):
            keys = [(numbers[id(p)], averages[block.name]) for p in block.parameters]
            found = [kinds.setdefault(key, len(kinds)) for key in keys]
            self._places[block.name] = [*zip(block.parameters, found, strict=True)]
        self._kinds = [*kinds]

    def sorted(
        self,
        groups: Sequence[dict[str, Any]],
        tensors: Mapping[str, Sequence[Tensor]],
    ) -> list[Moving]:
        """Parameters of blocks and their tensors, by rate, momentum and average."""
        found: dict[Any, Moving] = {}
        lists: list[Moving] = []
        for number, average in self._kinds:
            group = groups[number]
            key = group["lr"], group["momentum"], average
            lists.append(found.setdefault(key, (group, average, [], [])))
        for name, its in tensors.items():
            if name in self._places:
                for (p, kind), x in zip(self._places[name], its, strict=True):
                    lists[kind][2].append(p)
                    lists[kind][3].append(x)
        return [each for each in found.values() if each[2]]

    def of(self, groups: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
        """The groups of a block's parameters; none if they are not ours."""
        return [groups[self._kinds[kind][0]] for _, kind in self._places.get(name, ())]

    def largest(
        self, groups: Sequence[Mapping[str, Any]], names: Iterable[str]
    ) -> float:
        """The largest learning rate of some blocks."""
        kinds = {kind for name in names for _, kind in self._places.get(name, ())}
        return max((float(groups[self._kinds[k][0]]["lr"]) for k in kinds), default=0.0)


Change = tuple[Tensor, Tensor]
"""A parameter, and by how much it was changed."""


class Decay:
    """How weight decay enters, and what is done to weights after the update."""

    coupled: bool = True
    """Whether the decay is part of the gradient; else each step shrinks the weight."""

    def decayed(self, block: "Block") -> Sequence[Tensor]:
        """The parameters of a block that a decay which is not coupled shrinks."""
        return ()

    def rescaled(
        self, blocks: "Sequence[Block]", references: References
    ) -> list[Change]:
        """Change weights after the update; returns which, and by how much."""
        return []


@dataclass(frozen=True, kw_only=True)
class Coupled(Decay):
    """``weight_decay`` times the weight is added to the gradient, before the rule."""


Decayed = Literal["matrices", "all"]


@dataclass(frozen=True, kw_only=True)
class Decoupled(Decay):
    """A step first takes lr times ``weight_decay`` of the weight away.

    Attributes:
        of: ``"matrices"`` with a rule of their own: biases, norms and parameters that
            follow a fallback keep theirs, and so do embeddings, of which rows that are
            seldom read would fade. ``"all"`` parameters of the group, as AdamW does.
    """

    coupled = False

    of: Decayed = "matrices"

    def __post_init__(self) -> None:
        require_choice("of", self.of, get_args(Decayed))

    def decayed(self, block: "Block") -> Sequence[Tensor]:
        """All of them, or the weight of a matrix."""
        if self.of == "all":
            return block.parameters
        is_matrix = block.is_factored and not block.is_table
        return block.parameters[:1] if is_matrix else ()


@dataclass(frozen=True, kw_only=True)
class Rescaled(Decay):
    """As `Coupled`, and weights are kept at norm sqrt(2 d_out) (SP-NGD, eq. 24)."""

    def rescaled(
        self, blocks: "Sequence[Block]", references: References
    ) -> list[Change]:
        """Bring the weights of linear and convolution layers to that norm."""
        blocks = [b for b in blocks if b.kind is not None and b.kind.rescaled]
        weights = [local(b.parameters[0]).detach() for b in blocks]
        if not weights:
            return []
        before = [w.clone() for w in weights]
        norms = references.whole(torch.stack(norms_here(blocks, 0))).unbind()
        factors = [
            rescale_factor(norm, b.spec.stack * b.spec.rows)
            for b, norm in zip(blocks, norms, strict=True)
        ]
        foreach.multiply_(weights, factors)
        changes = foreach.subtract(weights, before)
        return list(zip([b.parameters[0] for b in blocks], changes, strict=True))


@dataclass(frozen=True, kw_only=True)
class FixedNorm(Decay):
    """After each step a matrix gets the norm back that it began with (Hyperball).

    So there is no other weight decay. With ``LayerTrust(memory=None)`` and
    ``Orthogonal(sides="none")`` this is MuonH: ``w - lr |w| U / |U|``, brought back to
    ``|w|``. A bias that is part of the matrix counts and moves with it.
    """

    coupled = False

    def rescaled(
        self, blocks: "Sequence[Block]", references: References
    ) -> list[Change]:
        """Multiply weights and biases by ``|w0| / |w|``."""
        known = [b for b in blocks if b.name in references.states]
        if not known:
            return []
        starts = torch.stack([references.states[b.name].start for b in known])
        now = references.weight_norms(known, starts)
        more = (starts / now - 1).nan_to_num_(0.0, 0.0, 0.0).unbind()
        named = [p for b in known for p in b.parameters]
        params = [local(p) for p in named]
        factors = [x for x, b in zip(more, known, strict=True) for _ in b.parameters]
        changes = foreach.multiplied(params, factors)
        foreach.add_(params, changes)
        return list(zip(named, changes, strict=True))
