"""Changed state dicts: loaded and working, or refused by name with nothing changed."""

import copy
import random
from functools import partial
from typing import Any

import torch
from tests.faults.arguments import drawn, made, network, step
from torch import Tensor

import natgrad

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "KFAC": ("KFAC", {"norm": "unit", "factor_decay": 0.5}),
    "KFAC corrected": ("KFAC", {"rule": natgrad.EKFAC(), "refresh": natgrad.Every()}),
    "KFAC adaptive": (
        "KFAC",
        {"rule": natgrad.EigenAdam(), "length": natgrad.LayerTrust()},
    ),
    "KFAC budget": ("KFAC", {"refresh": partial(natgrad.Budget, 0.5)}),
    "SPNGD": ("SPNGD", {}),
    "SPNGD adaptive": (
        "SPNGD",
        {"rule": natgrad.EigenAdam(), "fallback": natgrad.Adam()},
    ),
    "SPNGD budget": ("SPNGD", {"refresh": partial(natgrad.Budget, 0.5)}),
    "Polar": ("Polar", {}),
}
JUNK = [
    *[None, 0, -1, 3.5, "text", True, 10**9, float("nan")],
    *["list", "dict", "tensor", "not finite", "del", "extra", "wrong key"],
]
Place = tuple[Any, ...]


def junk(word: Any) -> Any:
    """A fresh object for a word that stands for one."""
    made: dict[Any, Any] = {
        "list": [1],
        "dict": {},
        "tensor": torch.zeros(2),
        "not finite": torch.full((1,), float("nan")),
    }
    return made[word] if isinstance(word, str) and word in made else word


def places(tree: Any, above: Place = ()) -> list[Place]:
    """Every place in a state."""
    found = [above] if above else []
    pairs = tree.items() if isinstance(tree, dict) else ()
    pairs = enumerate(tree) if isinstance(tree, list) else pairs
    for key, value in pairs:
        found += places(value, (*above, key))
    return found


def ours(place: Place, kind: str) -> bool:
    """Whether natgrad answers for a place: of SGD's own state, only for its form."""
    if kind != "KFAC" or place[0] == "natgrad":
        return True
    inner = place[2] if len(place) > 2 else "params"
    return inner in ("params", "lr")


def change(state: Any, place: Place, word: Any) -> None:
    """Put something else, or nothing, at one place of a state."""
    inner = state
    for key in place[:-1]:
        inner = inner[key]
    key = place[-1]
    if word == "del":
        del inner[key]
    elif word == "wrong key" and isinstance(inner, dict):
        inner[f"{key}_"] = inner.pop(key)
    elif word == "extra" and isinstance(inner[key], dict):
        inner[key]["extra"] = 1.0
    else:
        inner[key] = junk(word)


def words_of(places: list[Place]) -> set[str]:
    """What a refusal may name: the changed keys, or what they are in."""
    return {key for place in places for key in place[-2:] if isinstance(key, str)} | {
        str(place[0]) for place in places if not isinstance(place[-1], str)
    }


def alike(left: Any, right: Any) -> bool:
    """Whether two states are equal to the last bit."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        same = isinstance(right, dict) and left.keys() == right.keys()
        return same and all(alike(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        same = type(left) is type(right) and len(left) == len(right)
        return same and all(map(alike, left, right))
    return type(left) is type(right) and left == right


class Bench:
    """A good state, and an optimizer to load bad ones into."""

    def __init__(self, variant: str) -> None:
        self.kind, self.options = VARIANTS[variant]
        model = network()
        optimizer, natural = made(self.kind, model, self.options)
        for _ in range(4):
            step(model, optimizer, natural)
        self.good = copy.deepcopy(optimizer.state_dict())
        found = places(self.good)
        self.places = [place for place in found if ours(place, self.kind)]
        self.model = network()
        self.weights = copy.deepcopy(self.model.state_dict())
        self.optimizer, self.natural = made(self.kind, self.model, self.options)
        self.restore()

    def restore(self) -> None:
        """Back to where every load begins."""
        self.model.load_state_dict(self.weights)
        self.optimizer.load_state_dict(copy.deepcopy(self.good))
        step(self.model, self.optimizer, self.natural)
        self.model.load_state_dict(self.weights)
        self.before = copy.deepcopy(self.optimizer.state_dict())

    def try_one(self, source: random.Random) -> str:
        """ "works" or "refused"; anything else is an AssertionError."""
        state, changed = copy.deepcopy(self.good), list[Place]()
        for _ in range(source.randint(1, 2)):
            place, word = source.choice(self.places), source.choice(JUNK)
            try:
                change(state, place, word)
            except (KeyError, IndexError, TypeError, AttributeError):
                continue  # the first change has removed the place
            changed.append(place)
        return self.check(state, changed)

    def require_unchanged(self, changed: list[Place]) -> None:
        """Statistics, momentum, groups and weights are what they were."""
        assert alike(self.before, self.optimizer.state_dict()), changed
        assert alike(dict(self.weights), dict(self.model.state_dict())), changed

    def check(self, state: Any, changed: list[Place]) -> str:
        """Load a state: it works, or is refused by name and has changed nothing."""
        try:
            self.optimizer.load_state_dict(state)
        except ValueError as error:
            if not any(word in str(error) for word in words_of(changed)):
                text = f"{changed} refused with: {error}"
                raise AssertionError(text) from error
            self.require_unchanged(changed)
            return "refused"
        for _ in range(2):
            step(self.model, self.optimizer, self.natural)
        finite = all(bool(p.isfinite().all()) for p in self.model.parameters())
        assert finite, changed
        self.restore()
        return "works"


def search_states(variant: str, examples: int, number: int) -> dict[str, Any]:
    """Many changes of a good state; counts of what worked and was refused."""
    counts = {"works": 0, "refused": 0}
    bench = Bench(variant)

    def some_states(source: random.Random, size: int) -> None:
        for _ in range(size):
            counts[bench.try_one(source)] += 1

    drawn(some_states, examples, number)
    return counts
