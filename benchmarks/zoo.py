"""How far each optimizer gets on each member of the zoo, at a constant rate.

    python -m benchmarks.zoo                  # all members; then zoo.md is written
    python -m benchmarks.zoo --only VAE GRU   # these; others stay as they are
    python -m benchmarks.zoo --again Polar    # this optimizer; others stay as they are
    python -m benchmarks.zoo --report         # only write zoo.md

The members are third-party shapes (`tests/support/zoo.py`). AdamW and SGD with momentum
are run at three rates each. `KFAC` goes onto either at the rate that was best for it
without `KFAC`; `SPNGD` and `Polar` have the rates of the documentation. An optimizer
passes if its loss after 300 steps is at most 1.1 times that of AdamW at its best rate,
plus 0.01 of the loss at the start. A loss is of all examples, in training mode, the
mean over seeds. Where the loss is a sum, rates of SGD and `SPNGD` are divided by the
number of examples in a batch: so many times longer are its gradients. Writes zoo.json
and zoo.md.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.support.zoo import ZOO, Make, Member, train
from torch import nn
from torch.optim import Optimizer

import natgrad
from benchmarks.common import RESULTS, describe, machine, markdown_table, say

STEPS = 300
SEEDS = (0, 1, 2)
ADAMW_RATES = (1e-3, 3e-3, 1e-2)
SGD_RATES = (0.01, 0.03, 0.1)
POLAR_RATE = natgrad.Polar.defaults.lr
SPNGD_RATE = 0.02
NATURAL = ("Polar", "KFAC on SGD", "KFAC on AdamW", "SPNGD")
ALL = ("AdamW", "SGD", *NATURAL)
KEPT = "zoo.json"

Outcome = dict[str, Any]


def adamw(rate: float) -> Make:
    """AdamW as torch has it."""
    return lambda model, _: torch.optim.AdamW(_trained(model), lr=rate)


def sgd(rate: float) -> Make:
    """SGD with momentum 0.9."""
    return lambda model, member: torch.optim.SGD(
        _trained(model), lr=rate / _summed(member), momentum=0.9
    )


def kfac(host: Make) -> Make:
    """The line of the README."""

    def make(model: nn.Module, member: Member) -> Optimizer:
        optimizer = host(model, member)
        natgrad.KFAC(model, optimizer, damping=1e-2, loss=member.reduction)
        return optimizer

    return make


def spngd(model: nn.Module, member: Member) -> Optimizer:
    """As in the five-minute start."""
    rate = SPNGD_RATE / _summed(member)
    return natgrad.SPNGD(
        model, lr=rate, momentum=0.9, damping=1e-2, loss=member.reduction
    )


def polar(model: nn.Module, member: Member) -> Optimizer:
    """As in the README."""
    return natgrad.Polar(model, loss=member.reduction)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _summed(member: Member) -> int:
    """By how much longer gradients are than those of a mean."""
    return member.batch or 1 if member.reduction == "sum" else 1


def run_member(
    name: str,
    seeds: Sequence[int],
    steps: int,
    known: Outcome,
    wanted: Collection[str] = ALL,
) -> Outcome:
    """Means over seeds: losses by optimizer, those of AdamW and SGD by rate.

    What is not wanted stays as it is ``known``.
    """
    member, found = ZOO[name], dict(known)
    began = time.process_time()

    def mean(make: Make, steps: int = steps) -> float:
        return sum(train(member, make, s, steps) for s in seeds) / len(seeds)

    found["start"] = mean(adamw(1e-3), steps=0)
    if "AdamW" in wanted:
        found["AdamW"] = {str(r): mean(adamw(r)) for r in ADAMW_RATES}
    if "SGD" in wanted:
        found["SGD"] = {str(r): mean(sgd(r)) for r in SGD_RATES}
    makes = {
        "Polar": polar,
        "KFAC on SGD": kfac(sgd(best(found["SGD"]))),
        "KFAC on AdamW": kfac(adamw(best(found["AdamW"]))),
        "SPNGD": spngd,
    }
    found |= {key: mean(makes[key]) for key in NATURAL if key in wanted}
    before = 0.0 if set(wanted) == set(ALL) else found.get("seconds", 0.0)
    seconds = before + time.process_time() - began
    return {**found, "seconds": round(seconds, 1)}


def best(losses: Mapping[str, float]) -> float:
    """The rate with the lowest loss."""
    rates = {r: x for r, x in losses.items() if math.isfinite(x)}
    return float(min(rates, key=lambda r: rates[r]))


def bound(outcome: Outcome) -> float:
    """What a loss may be at most."""
    reached = outcome["AdamW"][str(best(outcome["AdamW"]))]
    return 1.1 * reached + 0.01 * outcome["start"]


def misses(outcome: Outcome) -> list[str]:
    """Optimizers of natgrad that do not keep to the bound."""
    limit = bound(outcome)
    return [key for key in NATURAL if not outcome[key] <= limit]


def row(name: str, outcome: Outcome) -> tuple[str, ...]:
    """Of the table; what misses the bound is bold."""
    cells = [f"{outcome['start']:.3g}", f"{bound(outcome):.3g}"]
    for host in ("AdamW", "SGD"):
        rate = best(outcome[host])
        cells.append(f"{outcome[host][str(rate)]:.3g} ({rate:g})")
    for key in NATURAL:
        text = f"{outcome[key]:.3g}"
        cells.append(f"**{text}**" if key in misses(outcome) else text)
    return (name, *cells)


def page(kept: Mapping[str, Any]) -> str:
    """The table."""
    members: dict[str, Outcome] = {
        n: kept["members"][n] for n in ZOO if n in kept["members"]
    }
    heads = ("member", "at the start", "may be", "AdamW (rate)", "SGD (rate)", *NATURAL)
    minutes = sum(m["seconds"] for m in members.values()) / 60
    missed = sum(len(misses(m)) for m in members.values())
    return "\n".join(
        [
            "# The zoo",
            "",
            f"Losses after {kept['steps']} steps at a constant rate, "
            f"means of seeds {', '.join(map(str, kept['seeds']))}, from "
            "`python -m benchmarks.zoo`. AdamW at "
            f"the best of {_listed(ADAMW_RATES)}, SGD with momentum 0.9 at the best of "
            f"{_listed(SGD_RATES)}; `KFAC` on each of them at that rate, with "
            "`damping=1e-2`; "
            f"`SPNGD(model, lr={SPNGD_RATE}, momentum=0.9, damping=1e-2)`; "
            f"`Polar(model)`, whose rate is {POLAR_RATE}. A loss may be 1.1 times that "
            "of AdamW plus 0.01 of that at the start; what is more is bold: "
            f"{missed} of {len(members) * len(NATURAL)}.",
            "",
            markdown_table(heads, [row(n, m) for n, m in members.items()]),
            "",
            f"{minutes:.1f} minutes on one core of {kept['machine']}",
            "",
        ]
    )


def _listed(rates: tuple[float, ...]) -> str:
    return ", ".join(f"{r:g}" for r in rates)


def main(words: Sequence[str] | None = None) -> None:
    """Run members, keep what they ended with, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(ZOO), choices=list(ZOO))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--again", nargs="*", default=list(ALL), choices=ALL)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = asked.out / KEPT
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if (kept.get("steps"), kept.get("seeds")) != (asked.steps, asked.seeds):
        kept = {"steps": asked.steps, "seeds": asked.seeds, "members": {}}
    kept["machine"] = describe(machine())
    for name in [] if asked.report else asked.only:
        known = kept["members"].get(name, {})
        wanted = asked.again if known else ALL
        known = run_member(name, asked.seeds, asked.steps, known, wanted)
        kept["members"][name] = known
        path.write_text(json.dumps(kept, indent=1) + "\n")
        say(" | ".join(row(name, kept["members"][name])))
    (asked.out / "zoo.md").write_text(page(kept))


if __name__ == "__main__":
    main()
