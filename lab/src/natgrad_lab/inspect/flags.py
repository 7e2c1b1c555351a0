"""What needs attention, in plain words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from natgrad_lab.inspect.records import column, layers, mean_seconds
from natgrad_lab.train.records import Record

SWAMPED = 1.0
STILL = 1e-6
STALE = 1.0
ENOUGH_STEPS = 20
NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A finding: ``level`` is "warning" or "note"."""

    level: str
    title: str
    text: str
    layers: tuple[str, ...] = ()


def find_flags(records: Sequence[Record]) -> list[Flag]:
    """All findings, the worst first."""
    finders: tuple[Callable[[Sequence[Record]], list[Flag]], ...] = (
        swamped,
        motionless,
        always_refreshed,
        stale,
        budget,
    )
    return [flag for find in finders for flag in find(records)]


def swamped(records: Sequence[Record]) -> list[Flag]:
    """Layers whose damping is above the largest eigenvalue, in most looks."""
    found: dict[str, float] = {}
    for layer in layers(records):
        ratio = _middle(records, layer, "damping_ratio")
        if ratio is not None and ratio > SWAMPED:
            found[layer] = ratio
    if not found:
        return []
    worst = max(found, key=lambda name: found[name])
    angle = _middle(records, worst, "angle")
    turned = "" if angle is None else f", and turns its gradient by {angle:.2g} degrees"
    text = (
        f"In {worst} the damping is {found[worst]:.3g} times the largest eigenvalue"
        f"{turned}: what is left is little more than a scaled gradient. Lower the "
        "damping, or skip these layers and save their cost."
    )
    title = f"The damping swamps the spectrum of {_names(found, records)}"
    return [Flag(level="warning", title=title, text=text, layers=tuple(found))]


def motionless(records: Sequence[Record]) -> list[Flag]:
    """Layers whose weights stay where they are between all looks."""
    found: list[str] = []
    for layer in layers(records):
        motion = [x for x in column(records, layer, "motion") if x is not None]
        if motion and max(motion) < STILL:
            found.append(layer)
    if not found:
        return []
    text = (
        f"Between any two looks they changed by less than {STILL:g} of "
        "themselves. Look for a learning rate of zero, a frozen or unused layer, a "
        "damping that is far too large, or a KL clip that is far too small."
    )
    title = f"The weights of {_names(found, records)} never moved"
    return [Flag(level="warning", title=title, text=text, layers=tuple(found))]


def always_refreshed(records: Sequence[Record]) -> list[Flag]:
    """Statistics that were estimated at each step, after the first look."""
    later = records[1:]
    steps = sum(r["steps"] for r in later)
    if steps < ENOUGH_STEPS:
        return []
    found: list[str] = []
    for name in records[-1]["statistics"]:
        done = sum(r["statistics"][name]["refreshed"] for r in later)
        if done >= steps:
            found.append(name)
    if not found:
        return []
    everything = len(found) == len(records[-1]["statistics"])
    seconds = mean_seconds(records)
    cost = seconds["estimate"] + seconds["sampled"] + seconds["reduce"]
    cost = 100 * (cost + seconds["refresh"]) / max(seconds["all"], 1e-12)
    which = "Every statistic" if everything else _list(found)
    verb = "is" if everything or len(found) == 1 else "are"
    text = (
        f"All refreshes together take {cost:.0f}% of the step. Longer intervals, "
        "Adaptive or Budget make them rarer; if the statistics do change that fast "
        "(see the change rates), a larger batch makes them change less."
    )
    title = f"{which} {verb} refreshed at every step"
    names = dict.fromkeys(name.rpartition("/")[0] for name in found)
    return [Flag(level="note", title=title, text=text, layers=tuple(names))]


def stale(records: Sequence[Record]) -> list[Flag]:
    """Layers whose statistics change by more than themselves between refreshes."""
    found: list[str] = []
    for layer in layers(records):
        change = _middle(records, layer, "change")
        if change is not None and change > STALE:
            found.append(layer)
    if not found:
        return []
    text = (
        "From one refresh to the next a statistic changes by more than its own size: "
        "most steps use one that is out of date. Refresh more often, or average over "
        "more examples: a larger batch or a larger decay."
    )
    title = f"The statistics of {_names(found, records)} are stale"
    return [Flag(level="warning", title=title, text=text, layers=tuple(found))]


def budget(records: Sequence[Record]) -> list[Flag]:
    """What a `Budget` says it had to give up."""
    said = records[-1].get("budget")
    if said is None:
        return []
    over = said["preconditioning"] > said["overhead"]
    level = "warning" if over else "note"
    return [Flag(level=level, title="What the budget bought", text=said["says"])]


def _middle(records: Sequence[Record], layer: str, key: str) -> float | None:
    values = [x for x in column(records, layer, key) if x is not None]
    return median(values) if values else None


def _names(found: Sequence[str] | dict[str, float], records: Sequence[Record]) -> str:
    total = len(layers(records))
    if len(found) == total and total > 1:
        return f"all {total} layers"
    return _list(list(found))


def _list(names: Sequence[str]) -> str:
    if len(names) > NAMED:
        shown = ", ".join(names[: NAMED - 1])
        return f"{shown} and {len(names) - NAMED + 1} more"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
