"""Random constructor arguments: accepted and working, or refused by name.

Every value is drawn as legal or illegal, and choices that do not go together are listed
in `conflicts`, so it is known beforehand what must work and what must be refused. A
refusal must begin with a name that was given an illegal value, or that is in conflict.
"""

import contextlib
import dataclasses
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
from tests.support.construct import construct
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
FIELDS = dataclasses.fields(natgrad.Options)
UNTRIED = {"group", "profile", "hessian"}
"""Objects that are not made at random."""
HOSTS = {"lr", "momentum", "weight_decay", "average", "decay"}
"""Options that KFAC's host optimizer has instead."""

# -- values ----------------------------------------------------------------------------

ODD = [float("nan"), float("inf"), float("-inf"), True, "0.1", [], {}, ()]
NUMBERS: dict[str, tuple[Callable[[random.Random], Any], list[Any]]] = {
    "fraction": (lambda r: r.choice([0, 0.5, r.random()]), [1, 1.5, -0.1, None, *ODD]),
    "positive": (lambda r: 10 ** r.uniform(-6, 3), [0, -1, -0.5, None, *ODD]),
    "least": (lambda r: r.choice([0, 10 ** r.uniform(-6, 3)]), [-1, -0.5, None, *ODD]),
    "share": (lambda r: r.choice([0, 1, r.random()]), [1.5, -0.1, None, *ODD]),
    "above zero": (lambda r: 1 - r.random(), [0, 1.5, -0.1, None, *ODD]),
    "count": (lambda r: r.randint(1, 20), [0, -1, 2.5, 1.0, "3", None, *ODD]),
    "count or None": (
        lambda r: r.choice([None, r.randint(1, 20)]),
        [0, -1, 2.5, 1.0, "3", *ODD],
    ),
}
OPTIONS = {
    "lr": "positive",
    "damping": "least",
    "factor_decay": "share",
    "momentum": "fraction",
    "weight_decay": "least",
    "norm_damping_ratio": "positive",
    "batch_part": "above zero",
    "subsample": "count or None",
    "largest_factor": "count or None",
}
LEGAL: dict[str, list[Any]] = {
    **{name: list(legal) for name, legal in CHOICES.items()},
    "strategy": ["factor_wise", "layer_wise", "spngd", "hybrid(0.5)", "auto"],
    "placement": [*PLACEMENTS, "measured"],
    "skip": [(), ("0",), ["1"], ("0", "1")],
    "factor_precision": [None, torch.bfloat16, torch.float16],
    "compile": [None],  # compilers are tried in tests of their own
    "gather_inputs": [True, False],
    "matrices": [None, 1],
}
ILLEGAL: dict[str, list[Any]] = {
    "skip": ["0", ("nowhere",), 3, None],
    "factor_precision": [torch.float32, torch.int8, "half"],
    "compile": ["other", True, 1],
    "gather_inputs": [],
    "matrices": [0, -1, 2.5, "3"],
}
SIDES = ["both", "inputs", "outputs"]
SOURCE = (["activations", "gradients"], ["other", None])
BASIS = (["exact", "tracked"], ["other", 1])
MOMENTS = (["move", "restart"], ["other", None])
SWITCH = ([True, False], [])
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "refresh": {
        "Every": {"statistics": "count", "inverses": "count"},
        "Adaptive": {"tolerance": ([0.1, 1, 1e-6], [0, -1, "0.1", float("nan"), None])},
        "Scheduled": {
            "steps_per_epoch": "count",
            "rule": (["staircase", "late"], ["other", None, 3]),
            "always_fresh": ([0, 3, 500], [-1, 2.5, "3", None]),
        },
        "Budget": {"overhead": "positive"},
        "Paced": {"share": "positive"},
    },
    "comm": {
        "CommOptions": {
            "bucket_bytes": ([1, 1000, 2**25], [0, -1]),
            "overlap": SWITCH,
            "precision": (
                [None, torch.bfloat16, torch.float16],
                [torch.float32, torch.int8, "half"],
            ),
            "half": ([(), ("share_updates",), ("share_inverses",)], [("x",), "half"]),
            "hierarchical": (["auto", True, False], ["other", None, 3]),
            "timeout": ([1, 30.0, 600], [0, -1, float("nan")]),
        }
    },
    "rule": {
        "Kronecker": {
            "sides": (SIDES, ["none", "other", 2]),
            "style": (
                ["eigen", "factored", "relative", "whole", "root"],
                ["other", None],
            ),
            "basis": BASIS,
            "source": SOURCE,
            "power": ([1.0, 0.5, 0.25], [0, -1, "1", None]),
        },
        "EKFAC": {
            "style": (["eigen", "relative"], ["factored", "whole", "other"]),
            "basis": BASIS,
            "moments": MOMENTS,
        },
        "EigenAdam": {
            "sides": ([*SIDES, "none"], ["other"]),
            "basis": BASIS,
            "moments": MOMENTS,
            "source": SOURCE,
            "orthogonal": SWITCH,
            "beta2": "fraction",
        },
        "Orthogonal": {
            "sides": ([*SIDES, "none"], ["other"]),
            "whitening": (["half", "full"], ["other"]),
            "style": (["relative", "factored"], ["eigen", "root", "other"]),
            "source": SOURCE,
            "power": ([None, 0.5, 0.25], [0, -1, "1"]),
            "iteration": (["best", "muon", ((2.0, -1.5, 0.5),)], ["other", (), 3]),
        },
    },
    "fallback": {"Plain": {}, "Adam": {"rate": "positive", "beta2": "fraction"}},
    "length": {
        "Free": {},
        "KLClip": {"kappa": "positive"},
        "LayerTrust": {
            "reference": (["start", "now"], ["other"]),
            "memory": ([None, 0.0, 0.9, 0.999], [1, -0.1, "1"]),
        },
        "MuonLength": {
            "adjust": (["original", "match_rms_adamw"], ["other"]),
            "normalise": SWITCH,
        },
    },
    "average": {
        "AverageUpdates": {"nesterov": SWITCH},
        "AverageGradients": {"nesterov": SWITCH},
    },
    "decay": {"Coupled": {}, "Decoupled": {}, "Rescaled": {}},
}
"""Options that are parts: their classes, and the fields of these."""


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
    if name in PARTS:
        return draw_part(source.choice([*PARTS[name]]), name, source, odd)
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
    """A part still to be made, of a few of its fields."""
    if source.random() < odd / 4:
        return Value(value=source.choice(["often", 10, {}]), wrong=(name,))
    known = PARTS[name][part]
    chosen = [f for f in known if f == "steps_per_epoch" or source.random() < 0.6]
    fields = {f: draw_one(f, known[f], source, odd) for f in chosen}
    return Value(
        value=partial(
            getattr(natgrad, part), **{f: v.value for f, v in fields.items()}
        ),
        wrong=tuple(f for v in fields.values() for f in v.wrong),
        choices=((name, part), *(c for v in fields.values() for c in v.choices)),
    )


def conflicts(kind: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs of options that do not go together; a refusal begins with the first."""
    found = {f.name: getattr(KINDS[kind].defaults, f.name) for f in FIELDS} | options
    rule, length = (_fields(found[name]) for name in ("rule", "length"))
    whole = rule.get("sides", "both") == "both" and rule.get("style") == "eigen"
    plain_power = rule.get("power", 1.0) == 1.0
    bases = rule["part"] != "Kronecker" or (whole and plain_power)
    natural = rule["part"] == "EKFAC" or (
        rule["part"] == "Kronecker" and plain_power and rule["source"] == "activations"
    )
    rules = {
        ("sharing", "loss"): (found["loss"], found["sharing"]) == ("tokens", "reduce"),
        ("basis", "style"): rule.get("basis") == "tracked" and not bases,
        ("length", "rule"): length["part"] == "KLClip" and not natural,
        ("gather_inputs", "rule"): rule["part"] == "EKFAC"
        and found["gather_inputs"] is False,
    }
    return [pair for pair, broken in rules.items() if broken]


def _fields(part: Any) -> dict[str, Any]:
    """What a part is or will be made of, and its class's name."""
    if isinstance(part, partial):
        made = {f.name: f.default for f in dataclasses.fields(part.func)}  # pyright: ignore[reportArgumentType]
        return {"part": part.func.__name__, **made, **part.keywords}  # pyright: ignore[reportFunctionMemberAccess]
    if not dataclasses.is_dataclass(part):
        return {"part": ""}
    own = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return {"part": type(part).__name__, **own}


# -- one set of arguments --------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))


def names(kind: str) -> list[str]:
    """The options that are drawn."""
    known = {f.name for f in FIELDS} - UNTRIED
    return sorted(known - HOSTS if kind == "KFAC" else known)


def made(kind: str, model: nn.Module, options: dict[str, Any]) -> tuple[Any, Any]:
    """What is stepped, and natgrad's; raises what the constructors raise."""
    chosen = {
        name: value() if isinstance(value, partial) else value
        for name, value in options.items()
    }
    if kind == "KFAC":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        return optimizer, construct(natgrad.KFAC, model, optimizer, **chosen)
    settled: dict[str, Any] = {"lr": 0.01, **chosen}
    optimizer = construct(KINDS[kind], model, **settled)
    return optimizer, optimizer


def step(model: nn.Module, optimizer: Any, natural: Any) -> None:
    """One step of training."""
    optimizer.zero_grad()
    outputs = model(INPUTS)
    if natural.engine.options.fisher == "sampled":
        natural.sampled_backward(outputs, "mse")
    outputs.square().mean().backward()
    optimizer.step()


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
    apart = conflicts(kind, options)
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
    for name in names(kind):
        for part, fields in PARTS.get(name, {}).items():
            found.add((name, part))
            words = {n: f[0] for n, f in fields.items() if not isinstance(f, str)}
            found |= {(n, repr(v)) for n, legal in words.items() for v in legal}
    return found


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
        owner = _owner(name, word, known)
        others = [n for n in known if n != owner]
        for _ in range(300):
            if (name, word) in worked:
                break
            chosen = [owner, *source.sample(others, source.randint(0, 6))]
            try_set(kind, chosen, source, worked, odd=0.0)
    return sorted(choices(kind) - worked.keys())


def _owner(name: str, word: str, known: list[str]) -> str:
    """The option that a word is of: itself, or the part that has such a field."""
    if (name in PARTS and word in PARTS[name]) or (name in known and name not in PARTS):
        return name
    return next(
        option
        for option in known
        for fields in PARTS.get(option, {}).values()
        if name in fields and not isinstance(fields[name], str)
        if word in map(repr, fields[name][0])
    )


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
