"""Random constructor arguments and state dicts: accepted and working, or refused."""

import copy
import operator
import random
import re
import warnings
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import natgrad

NUMBERS = st.one_of(
    st.floats(1e-6, 0.99),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-3, 200),
    st.sampled_from([None, True, "0.1", 0, 1, 0.5]),
)
EVERY_CHECK: Any = list(HealthCheck)
INPUTS = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
COUNTS = st.one_of(st.integers(1, 20), st.integers(-3, 0), NUMBERS)


def words(*legal: Any) -> Any:
    """Mostly legal choices."""
    return st.one_of(
        st.sampled_from(legal), st.sampled_from([*legal, "other", "", None, 3])
    )


REFRESH = st.one_of(
    st.tuples(st.just("Every"), COUNTS, COUNTS),
    st.tuples(st.just("Adaptive"), NUMBERS),
    st.tuples(st.just("Scheduled"), COUNTS, words("staircase", "late")),
    st.sampled_from([("none",), ("word",)]),
)
COMMON: dict[str, Any] = {
    "statistics": words("both", "inputs", "outputs"),
    "scale": words("kronecker", "corrected", "adaptive", "orthogonal"),
    "whitening": words("half", "full"),
    "basis": words("exact", "tracked"),
    "trust": words("none", "kl", "layer"),
    "rest": words("plain", "adaptive"),
    "beta2": NUMBERS,
    "damping": NUMBERS,
    "damping_style": words("eigen", "factored", "relative"),
    "decay": NUMBERS,
    "refresh": REFRESH,
    "fisher": words("empirical", "sampled"),
    "loss": words("mean", "sum", "tokens"),
    "accumulation": words("mean", "sum"),
    "sharing": words("expand", "reduce"),
    "norm": words("skip", "unit", "diag", "full"),
    "norm_damping_ratio": NUMBERS,
    "skip": st.sampled_from([(), ("0",), ["1"], "0", ("nowhere",), {"0", "1"}]),
    "subsample": COUNTS,
    "strategy": words("factor_wise", "layer_wise", "spngd"),
    "placement": words("longest_first", "round_robin", "measured"),
}
KFAC: dict[str, Any] = {**COMMON, "kl_clip": NUMBERS, "lr": NUMBERS}
SPNGD: dict[str, Any] = {
    **COMMON,
    "lr": NUMBERS,
    "momentum": NUMBERS,
    "weight_decay": NUMBERS,
    "rescale_weights": st.booleans(),
    "nesterov": st.booleans(),
    "average": words("update", "gradient"),
}


def some(options: dict[str, Any]) -> Any:
    """One to three of the options, so that many a set is legal."""
    names = st.lists(st.sampled_from(sorted(options)), min_size=1, max_size=3)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({name: options[name] for name in chosen})
    )


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


def made(kind: str, model: nn.Module, options: dict[str, Any]) -> Any:
    """The optimizer, and KFAC's; raises what the constructors raise."""
    chosen = dict(options)
    if "refresh" in chosen:
        name, *args = chosen["refresh"]
        maker = getattr(natgrad, name, None)
        if name == "Scheduled":
            chosen["refresh"] = natgrad.Scheduled(steps_per_epoch=args[0], rule=args[1])
        else:
            chosen["refresh"] = (
                maker(*args) if maker else {"none": None}.get(name, name)
            )
    if kind == "SPNGD":
        settled: dict[str, Any] = {"lr": 0.01, **chosen}
        optimizer: Any = natgrad.SPNGD(model, **settled)
        optimizer.natgrad_engine = optimizer.engine
        return optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    optimizer.natgrad_engine = natgrad.KFAC(model, optimizer, **chosen).engine
    return optimizer


def names_one_of(message: str, options: dict[str, Any]) -> bool:
    """Whether a refusal tells which argument is meant."""
    inner = {"statistics", "inverses", "tolerance", "steps_per_epoch", "rule"}
    known = {*options, *inner, "layer"}
    return any(re.search(rf"\b{name}\b", message) for name in known)


def check_arguments(kind: str, options: dict[str, Any]) -> str:
    """ "works" or "refused"; anything else is an AssertionError."""
    model = network()
    try:
        optimizer = made(kind, model, options)
    except (ValueError, TypeError, KeyError) as error:
        if not names_one_of(str(error), options):
            raise AssertionError(f"{options} refused with: {error}") from error
        return "refused"
    model(INPUTS).square().mean().backward()
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters()), options
    return "works"


# -- state dicts -----------------------------------------------------------------------

JUNK = st.sampled_from([None, 0, -1, 3.5, "text", [], {}, [1], "tensor", "nan", "del"])


def junk(word: Any) -> Any:
    if word == "tensor":
        return torch.zeros(2)
    return torch.full((1,), float("nan")) if word == "nan" else word


def paths(tree: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a state."""
    found = [above] if above else []
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += paths(value, (*above, key))
    elif isinstance(tree, list):
        for key, value in enumerate(tree):
            found += paths(value, (*above, key))
    return found


def changed(state: Any, path: tuple[Any, ...], word: Any) -> Any:
    """A copy of a state with something else, or nothing, at one place."""
    other = copy.deepcopy(state)
    inner = other
    for key in path[:-1]:
        inner = inner[key]
    if word == "del":
        del inner[path[-1]]
    else:
        inner[path[-1]] = junk(word)
    return other


def check_state(state: Any, target: Any, model: nn.Module) -> str:
    """Load a state: it works, or is refused and has changed nothing."""
    engine = target.natgrad_engine
    before = engine.step, list(engine.statistics.states.values())
    try:
        target.load_state_dict(state)
    except ValueError:
        after = engine.step, list(engine.statistics.states.values())
        if before[0] != after[0] or any(map(operator.is_not, before[1], after[1])):
            raise AssertionError("a refused state has changed something") from None
        return "refused"
    target.zero_grad()
    model(INPUTS).square().mean().backward()
    target.step()
    return "works"


def search(kind: str, examples: int, number: int) -> dict[str, int]:
    """Try many; counts of what worked and what was refused."""
    counts = {"works": 0, "refused": 0}
    options = KFAC if kind == "KFAC" else SPNGD
    quiet = settings(
        deadline=None,
        max_examples=examples,
        database=None,
        suppress_health_check=EVERY_CHECK,
    )

    @seed(number)
    @quiet
    @given(some(options))
    def arguments(chosen: dict[str, Any]) -> None:
        counts[check_arguments(kind, chosen)] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments()
    return counts


def search_states(kind: str, examples: int, number: int) -> dict[str, int]:
    """Try many changes of a good state; counts of what worked and was refused."""
    counts = {"works": 0, "refused": 0}
    model = network()
    source = made(kind, model, {})
    x = torch.randn(4, 2)
    model(x).square().mean().backward()
    source.step()
    good = copy.deepcopy(source.state_dict())
    places = paths(good["natgrad"])
    target = made(kind, model, {})
    quiet = settings(
        deadline=None,
        max_examples=examples,
        database=None,
        suppress_health_check=EVERY_CHECK,
    )

    @seed(number)
    @quiet
    @given(st.sampled_from(places), JUNK)
    def states(path: tuple[Any, ...], word: Any) -> None:
        bad = {**good, "natgrad": changed(good["natgrad"], path, word)}
        nonlocal target
        try:
            counts[check_state(bad, target, model)] += 1
        finally:
            target.load_state_dict(copy.deepcopy(good))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states()
    return counts


# -- many, quickly ---------------------------------------------------------------------

PER_SEED = 50
"""Sets that are made of one number of hypothesis: drawing each would take longer than
trying it."""
ANY: dict[str, list[Any]] = {
    "number": [1e-6, 1e-3, 0.1, 0.5, 0.99, 1, 2.5, 0, -1, -0.5, 1e4, 1e-30, 200],
    "count": [1, 2, 3, 7, 20, 0, -1, 2.5, 1.0, "3", None, True],
    "odd": [float("nan"), float("inf"), float("-inf"), None, True, "0.1", [], {}, ()],
}
LEGAL: dict[str, list[Any]] = {
    "damping_style": ["eigen", "factored"],
    "fisher": ["empirical", "sampled"],
    "loss": ["mean", "sum", "tokens"],
    "accumulation": ["mean", "sum"],
    "sharing": ["expand", "reduce"],
    "norm": ["skip", "unit", "diag", "full"],
    "strategy": ["factor_wise", "layer_wise", "spngd", "hybrid(0.5)"],
    "placement": ["longest_first", "round_robin", "measured"],
    "skip": [(), ("0",), ["1"], {"0", "1"}],
    "rescale_weights": [True, False],
}


def quick_value(name: str, source: random.Random) -> Any:
    """A value for an option, legal more often than not."""
    if name == "refresh":
        return source.choice(
            [
                (
                    "Every",
                    quick_value("subsample", source),
                    source.choice(ANY["count"]),
                ),
                ("Adaptive", quick_value("damping", source)),
                ("Scheduled", source.choice(ANY["count"]), "staircase"),
                ("none",),
            ]
        )
    if name in LEGAL:
        odd = [*ANY["odd"][3:], "other", "", 3]
        return source.choice(LEGAL[name] if source.random() < 0.7 else odd)
    pool = ANY["count"] if name == "subsample" else ANY["number"]
    return source.choice(pool if source.random() < 0.8 else ANY["odd"])


def search_quickly(kind: str, examples: int, number: int) -> dict[str, int]:
    """Many sets of arguments; counts of what worked and what was refused."""
    counts = {"works": 0, "refused": 0}
    names = sorted(KFAC if kind == "KFAC" else SPNGD)

    def some_sets(drawn: int) -> None:
        source = random.Random(drawn)
        for _ in range(PER_SEED):
            chosen = source.sample(names, source.randint(1, 3))
            options = {name: quick_value(name, source) for name in chosen}
            counts[check_arguments(kind, options)] += 1

    _drawn(some_sets, examples, number)
    return counts


def search_states_quickly(kind: str, examples: int, number: int) -> dict[str, int]:
    """Many changed states; counts of what worked and what was refused."""
    counts = {"works": 0, "refused": 0}
    model = network()
    source, target = made(kind, model, {}), made(kind, network(), {})
    model(torch.randn(4, 2)).square().mean().backward()
    source.step()
    good = copy.deepcopy(source.state_dict())
    places = paths(good["natgrad"])
    legal = [None, 0, -1, 3.5, "text", [], {}, [1], "tensor", "nan", "del", True, 10**9]

    def some_states(drawn: int) -> None:
        nonlocal target
        chance = random.Random(drawn)
        other = network()
        target = made(kind, other, {})
        for _ in range(PER_SEED):
            state = good["natgrad"]
            for _ in range(chance.randint(1, 2)):
                where = chance.choice(places)
                try:
                    state = changed(state, where, chance.choice(legal))
                except (KeyError, IndexError, TypeError):
                    continue  # the first change has removed the place
            seen = check_state({**good, "natgrad": state}, target, other)
            counts[seen] += 1
            if seen == "works":
                target.load_state_dict(copy.deepcopy(good))

    _drawn(some_states, examples, number)
    return counts


def _drawn(function: Any, examples: int, number: int) -> None:
    rounds = examples // PER_SEED
    quiet = settings(
        deadline=None,
        max_examples=rounds,
        database=None,
        suppress_health_check=EVERY_CHECK,
    )
    ran: set[int] = set()

    @seed(number)
    @quiet
    @given(st.integers(0, 2**62))
    def search(drawn: int) -> None:
        ran.add(drawn)
        function(drawn)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search()
        for extra in range(rounds - len(ran)):  # hypothesis may repeat a number
            function(-1 - extra)
