"""Draw docs/figures/scaling_*.png: every strategy to 100,000 ranks, on ring and tree.

python -m benchmarks.simulated_scaling [FOLDER]
"""

import sys
from dataclasses import replace
from pathlib import Path

from natgrad_lab.simulate.figures import gantt, scaling_figure
from natgrad_lab.simulate.policy import every
from natgrad_lab.simulate.profile import find_profile
from natgrad_lab.simulate.roles import Conditions
from natgrad_lab.simulate.run import SGD, Method, Result, scaling, simulate
from natgrad_lab.simulate.work import work_of

WORLDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 50000, 100000)
STRATEGIES = ("spngd", "layer_wise", "factor_wise", "hybrid(0.25)")


def stops(results: list[Result], strategy: str, factor: float) -> int | None:
    """The first world whose step is ``factor`` times the shortest step before it."""
    best = float("inf")
    for each in (r for r in results if r.strategy == strategy):
        best = min(best, each.seconds)
        if each.seconds > factor * best:
            return each.world
    return None


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")
    work = work_of("resnet50", norm="unit")
    method = Method(inverse="factored", policy=every(10, 100))
    methods = [SGD, *(replace(method, strategy=name) for name in STRATEGIES)]
    conditions = Conditions(batch=32, half=("share_updates",))
    for algorithm in ("ring", "tree"):
        profile = replace(find_profile("abci"), algorithm=algorithm)
        results = scaling(work, profile, WORLDS, methods, conditions)
        scaling_figure(results, folder / f"scaling_{algorithm}.png")
        print(f"{algorithm}: milliseconds a step")
        print(
            "strategy".ljust(14) + "".join(f"{w:>9}" for w in WORLDS) + "  1.2x  2x at"
        )
        for name in ("sgd", *STRATEGIES):
            mine = [r for r in results if r.strategy == name]
            cells = "".join(f"{1e3 * r.seconds:>9.1f}" for r in mine)
            ends = [stops(results, name, factor) for factor in (1.2, 2.0)]
            print(name.ljust(14) + cells + f"  {ends[0]}  {ends[1]}")
    one = simulate(
        work,
        find_profile("abci"),
        256,
        replace(method, strategy="spngd"),
        conditions,
    )
    gantt(one.longest, folder / "gantt.png", "ResNet-50, spngd on 256 V100, all due")


if __name__ == "__main__":
    main()
