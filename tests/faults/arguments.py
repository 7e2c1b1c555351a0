"""Random constructor arguments: accepted and working, or refused by name.

Every value is drawn as legal or illegal, and choices that do not go together are listed
in `conflicts`, so it is known beforehand what must work and what must be refused. A
refusal must begin with a name that was given an illegal value, or that is in conflict.
"""

import contextlib
import inspect
import io
import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import natgrad
from natgrad.options import CHOICES
from natgrad.plan import PLACEMENTS

EVERY_CHECK: Any = list(HealthCheck)
INPUTS = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
KINDS: dict[str, Any] = {
    "KFAC": natgrad.KFAC,
    "SPNGD": natgrad.SPNGD,
    "Polar": natgrad.Polar,
}
UNTRIED = {"model", "optimizer", "param_groups", "grad_scaler", "group", "profile"}
"""Objects that are not made at random."""

# -- values ----------------------------------------------------------------------------

ODD = [float("nan"), float("inf"), float("-inf"), True, "0.1", [], {}, ()]
NUMBERS: dict[str, tuple[Callable[[random.Random], Any], list[Any]]] = {
    "fraction": (lambda r: r.choice([0, 0.5, r.random()]), [1, 1.5, -0.1, None, *ODD]),
    "positive": (lambda r: 10 ** r.uniform(-6, 3), [0, -1, -0.5, None, *ODD]),
    "least": (lambda r: r.choice([0, 10 ** r.uniform(-6, 3)]), [-1, -0.5, None, *ODD]),
    "count": (lambda r: r.randint(1, 20), [0, -1, 2.5, 1.0, "3", None, *ODD]),
    "count or None": (
        lambda r: r.choice([None, r.randint(1, 20)]),
        [0, -1, 2.5, 1.0, "3", *ODD],
    ),
    "rate": (lambda r: 10 ** r.uniform(-6, 3), [0, -1, -0.5, *ODD]),  # KFAC's: or None
    "clip": (lambda r: r.choice([None, 10 ** r.uniform(-6, 3)]), [0, -1, *ODD]),
}
OPTIONS = {
    "lr": "rate",
    "kl_clip": "clip",
    "beta2": "fraction",
    "damping": "least",
    "decay": "fraction",
    "momentum": "fraction",
    "weight_decay": "least",
    "norm_damping_ratio": "positive",
    "subsample": "count or None",
    "rest_rate": "positive",
}
LEGAL: dict[str, list[Any]] = {
    **{name: list(legal) for name, legal in CHOICES.items()},
    "average": ["update", "gradient"],
    "strategy": ["factor_wise", "layer_wise", "spngd", "hybrid(0.5)", "auto"],
    "placement": [*PLACEMENTS, "measured"],
    "skip": [(), ("0",), ["1"], ("0", "1")],
    "rescale_weights": [True, False],
    "nesterov": [True, False],
}
ILLEGAL: dict[str, list[Any]] = {
    "skip": ["0", ("nowhere",), 3, None],
    "rescale_weights": [],
    "nesterov": [],
}
PARTS: dict[str, dict[str, Any]] = {
    "Every": {"statistics": "count", "inverses": "count"},
    "Adaptive": {"tolerance": ([0.1, 1, 1e-6], [0, -1, "0.1", float("nan"), None])},
    "Scheduled": {
        "steps_per_epoch": "count",
        "rule": (["staircase", "late"], ["other", None, 3]),
        "always_fresh": ([0, 3, 500], [-1, 2.5, "3", None]),
    },
    "Budget": {"overhead": "positive"},
    "CommOptions": {
        "bucket_bytes": ([1, 1000, 2**25], [0, -1]),
        "overlap": ([True, False], []),
        "precision": (
            [None, torch.bfloat16, torch.float16],
            [torch.float32, torch.int8, "half"],
        ),
        "half": ([(), ("share_updates",), ("share_inverses",)], [("other",), "half"]),
        "hierarchical": (["auto", True, False], ["other", None, 3]),
        "timeout": ([1, 30.0, 600], [0, -1, float("nan")]),
    },
}


@dataclass(frozen=True, kw_only=True)
class Value:
    """What was drawn for an option.

    ``wrong`` names what is illegal in it; ``choices`` are the legal words in it.
    """

    value: Any
    wrong: tuple[str, ...] = ()
    choices: tuple[tuple[str, str], ...] = ()


def draw(name: str, source: random.Random, odd: float = 0.2) -> Value:
    """A value for an option, illegal in the share ``odd`` of cases."""
    if name == "refresh":
        return draw_part(source.choice([*PARTS][:4]), name, source, odd)
    if name == "comm":
        return draw_part("CommOptions", name, source, odd)
    return draw_one(name, OPTIONS.get(name) or _words(name), source, odd)


def _words(name: str) -> tuple[list[Any], list[Any]]:
    # None, where it is a default, means what goes with the rest
    return LEGAL[name], ILLEGAL.get(name, ["other", "", 3, []])


def draw_one(name: str, kind: Any, source: random.Random, odd: float) -> Value:
    """A number of a kind, or one of two lists: legal and illegal."""
    numbers = isinstance(kind, str)
    legal: Any
    legal, illegal = NUMBERS[kind] if numbers else kind
    if illegal and source.random() < odd:
        return Value(value=source.choice(illegal), wrong=(name,))
    if numbers:
        return Value(value=legal(source))
    value = source.choice(legal)
    return Value(value=value, choices=((name, repr(value)),))


def draw_part(part: str, name: str, source: random.Random, odd: float) -> Value:
    """A `Refresh` or `CommOptions` still to be made, of a few of its fields."""
    if name == "refresh" and source.random() < odd / 4:
        return Value(value=source.choice([None, "often", 10]), wrong=("refresh",))
    chosen = [f for f in PARTS[part] if f == "steps_per_epoch" or source.random() < 0.6]
    fields = {f: draw_one(f, PARTS[part][f], source, odd) for f in chosen}
    return Value(
        value=partial(
            getattr(natgrad, part), **{f: v.value for f, v in fields.items()}
        ),
        wrong=tuple(f for v in fields.values() for f in v.wrong),
        choices=((name, part), *(c for v in fields.values() for c in v.choices)),
    )


def conflicts(options: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs of options that do not go together; a refusal begins with the first."""

    def given(name: str, *values: str) -> bool:
        return options.get(name) in values

    orthogonal, both = given("scale", "orthogonal"), given("statistics", "both")
    whole = both and given("damping_style", "eigen")
    bases = given("scale", "adaptive", "corrected")
    bases |= whole and not (orthogonal and given("whitening", "half"))
    unscaled = given("scale", "adaptive", "orthogonal")
    corrected = given("scale", "corrected")
    rules = {
        ("sharing", "loss"): given("loss", "tokens") and given("sharing", "reduce"),
        ("damping_style", "scale"): (orthogonal and whole)
        or (corrected and given("damping_style", "factored")),
        ("statistics", "scale"): corrected and not both,
        ("trust", "scale"): given("trust", "kl") and unscaled,
        ("whitening", "scale"): given("whitening", "full") and not orthogonal,
        ("basis", "scale"): given("basis", "tracked") and not bases,
    }
    return [pair for pair, broken in rules.items() if broken]


# -- one set of arguments --------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))


def names(kind: str) -> list[str]:
    """The options of a constructor that are drawn."""
    return sorted({*inspect.signature(KINDS[kind]).parameters} - UNTRIED)


def made(kind: str, model: nn.Module, options: dict[str, Any]) -> tuple[Any, Any]:
    """What is stepped, and natgrad's; raises what the constructors raise."""
    chosen = {
        name: value() if isinstance(value, partial) else value
        for name, value in options.items()
    }
    if kind == "KFAC":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        return optimizer, natgrad.KFAC(model, optimizer, **chosen)
    settled: dict[str, Any] = {"lr": 0.01, **chosen}
    optimizer = KINDS[kind](model, **settled)
    return optimizer, optimizer


def step(model: nn.Module, optimizer: Any, natural: Any) -> None:
    """One step of training."""
    optimizer.zero_grad()
    outputs = model(INPUTS)
    if natural.engine.config.fisher == "sampled":
        natural.sampled_backward(outputs, "mse")
    outputs.square().mean().backward()
    optimizer.step()


def settled(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options with the defaults of what was not given; Polar has its own rule."""
    signature = inspect.signature(KINDS[kind]).parameters.items()
    found = {name: each.default for name, each in signature} | options
    style, trust = ("eigen", "kl") if kind == "KFAC" else ("factored", "none")
    scale = found.get("scale")
    if scale == "orthogonal" and kind == "KFAC" and found["statistics"] == "both":
        style = "relative"
    style = "eigen" if scale == "corrected" else style
    trust = "layer" if scale in ("adaptive", "orthogonal") else trust
    chosen = {"damping_style": style, "trust": trust}
    return found | {k: v for k, v in chosen.items() if found.get(k) is None}


def names_what_is_wrong(
    text: str, wrong: list[str], apart: list[tuple[str, str]]
) -> bool:
    """Whether a refusal tells which illegal value, or which conflict, is meant."""
    if any(f"Invalid {name}=" in text for name in wrong):
        return True
    return any(f"Invalid {a}=" in text and f" {b}=" in text for a, b in apart)


def check_arguments(kind: str, drawn: dict[str, Value]) -> str:
    """ "works" or "refused", as it must be; anything else is an AssertionError."""
    options = {name: each.value for name, each in drawn.items()}
    wrong = [name for each in drawn.values() for name in each.wrong]
    apart = conflicts(settled(kind, options))
    model = network()
    try:
        optimizer, natural = made(kind, model, options)
    except (ValueError, TypeError) as error:
        if not names_what_is_wrong(str(error), wrong, apart):
            raise AssertionError(f"{kind} {options} refused with: {error}") from error
        return "refused"
    assert not [*wrong, *apart], f"{kind} {options} was not refused"
    for _ in range(2):
        step(model, optimizer, natural)
    assert all(bool(p.isfinite().all()) for p in model.parameters()), options
    # a learning rate of hundreds without damping may end in weights that overflow
    skipped = natural.health()["skipped_steps"]
    assert skipped < 2, options
    assert natural.engine.step + skipped == 2, options
    return "works"


def try_set(
    kind: str,
    chosen: list[str],
    source: random.Random,
    worked: Counter[Any],
    odd: float = 0.2,
) -> str:
    """Draw a value for each of some options and check them; notes what worked."""
    drawn = {name: draw(name, source, odd) for name in chosen}
    with contextlib.redirect_stderr(io.StringIO()):  # "auto" says what it chose
        outcome = check_arguments(kind, drawn)
    if outcome == "works":
        worked.update(choice for each in drawn.values() for choice in each.choices)
    return outcome


def choices(kind: str) -> set[tuple[str, str]]:
    """Every word that some set of arguments must have worked with."""
    found = {(n, repr(v)) for n in names(kind) for v in LEGAL.get(n, [])}
    found |= {("refresh", part) for part in [*PARTS][:4]} | {("comm", "CommOptions")}
    fields = {n: f for part in PARTS.values() for n, f in part.items()}
    words = {n: f[0] for n, f in fields.items() if not isinstance(f, str)}
    return found | {(n, repr(v)) for n, legal in words.items() for v in legal}


# -- many ------------------------------------------------------------------------------

PER_SEED = 50
"""Sets that are made of one number of hypothesis: drawing each would take longer than
trying it."""


def search(kind: str, examples: int, number: int) -> dict[str, Any]:
    """Many sets; counts, and the legal choices that never worked."""
    counts = {"works": 0, "refused": 0}
    known, worked = names(kind), Counter[Any]()

    def some_sets(source: random.Random, size: int) -> None:
        for _ in range(size):
            chosen = source.sample(known, source.randint(1, 5))
            counts[try_set(kind, chosen, source, worked)] += 1

    drawn(some_sets, examples, number)
    missing = sorted(map(" ".join, choices(kind) - worked.keys()))
    return {**counts, "untried": missing}


def unworkable(kind: str) -> list[tuple[str, str]]:
    """The legal choices that do not work in 300 sets with others."""
    worked, source = Counter[Any](), random.Random(0)
    known = names(kind)
    for name, word in sorted(choices(kind)):
        owner = name if name in known else "refresh"
        owner = "comm" if name in PARTS["CommOptions"] else owner
        others = [n for n in known if n != owner]
        for _ in range(300):
            if (name, word) in worked:
                break
            chosen = [owner, *source.sample(others, source.randint(0, 6))]
            try_set(kind, chosen, source, worked, odd=0.0)
    return sorted(choices(kind) - worked.keys())


def drawn(
    function: Callable[[random.Random, int], None], examples: int, number: int
) -> None:
    """Call with random sources that hypothesis draws, for as many examples in all."""
    rounds = -(-examples // PER_SEED)
    quiet = settings(
        deadline=None,
        max_examples=rounds,
        database=None,
        suppress_health_check=EVERY_CHECK,
        phases=[Phase.generate],  # there is nothing to shrink in a number
    )
    ran: set[int] = set()

    @seed(number)
    @quiet
    @given(st.integers(0, 2**62))
    def some(drawn: int) -> None:
        ran.add(drawn)
        function(random.Random(drawn), min(PER_SEED, examples))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        some()
        for extra in range(rounds - len(ran)):  # hypothesis may repeat a number
            function(random.Random(-1 - extra), min(PER_SEED, examples))
