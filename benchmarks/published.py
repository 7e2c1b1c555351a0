"""The simulation against published measurements: every table of docs/scaling.md.

    python -m benchmarks.published [FOLDER]

Prints Tables III to VI of Pauloski et al. 2020, the placements, and Tables 1 and 2 of
Osawa et al. 2020; draws docs/figures/hours.png, which is Figure 7 of the former. The
figure alone, and other models', by the command: ::

    natgrad simulate --model resnet50 --norm skip --profile frontera \\
        --placement round_robin --gradients ddp --per-epoch 1.25 --epochs 90 55 55 \\
        --world 16 32 64 128 256 --strategies sgd layer_wise factor_wise --figures .
"""

import statistics
import sys
from itertools import combinations
from pathlib import Path

from natgrad.plan import Plan, make_plan
from natgrad.plan.loads import inversion_loads
from natgrad_lab.simulate.command import SimulateCommand, hours_of, run
from natgrad_lab.simulate.figures import scaling_figure
from natgrad_lab.simulate.policy import every, reduced
from natgrad_lab.simulate.profile import find_profile
from natgrad_lab.simulate.published import (
    CONTRADICTORY,
    EFFICIENCY,
    EIGEN_MS,
    FASTEST_SPEEDUP,
    FITTED_ROWS,
    IMPROVEMENT,
    REDUCTION,
    SLOWEST_SPEEDUP,
    STALE_SPEEDUP,
    STEP_SECONDS,
    Row,
    fit_eigen,
    worker_seconds,
    worker_sizes,
)
from natgrad_lab.simulate.roles import Conditions
from natgrad_lab.simulate.run import SGD, Method, simulate
from natgrad_lab.simulate.work import work_of

MODELS = ("resnet50", "resnet101", "resnet152")
MINUTES = {"resnet50": (178, 128), "resnet101": (244, 197), "resnet152": (345, 310)}
"""Table III on 64 GPUs: SGD, and K-FAC with inverses every 500 steps."""
IMAGENET, BATCH = 1_281_167, 32
Workers = dict[Row, list[list[int]]]


def eigen(workers: Workers) -> None:
    """Tables V and VI with the profile, and how they depend on the fitted rows."""
    curve = find_profile("frontera").eigen
    slow = {row: max(worker_seconds(curve, w)) for row, w in workers.items()}
    fast = {row: min(worker_seconds(curve, w)) for row, w in workers.items()}
    print(
        f"Tables V and VI, {1e3 * curve.call:.1f} ms + {1e9 * curve.square:.1f} ns n^2"
    )
    errors: list[float] = []
    for row, ms in EIGEN_MS.items():
        errors.append(1e3 * slow[row] / ms - 1)
        mark = "fitted" if row in FITTED_ROWS else ""
        line = f"{row[0]:<10}{row[1]:>4} {mark:<7}{ms:>6.0f} {1e3 * slow[row]:>6.0f}"
        line += f" {errors[-1]:+.1%}"
        if row in SLOWEST_SPEEDUP:
            for times, known in ((slow, SLOWEST_SPEEDUP), (fast, FASTEST_SPEEDUP)):
                found = times[row[0], 16] / times[row]
                line += f"  {known[row]:.2f} {found:.2f} {found / known[row] - 1:+.1%}"
        print(line)
    sizes = [abs(e) for e in errors]
    print(f"median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")
    choices(workers)


def choices(workers: Workers) -> None:
    """How many choices of three rows meet the bounds of Tables V and VI."""
    good = {"V": 0, "VI": 0, "VI but one": 0, "V and VI but one": 0}
    for rows in combinations(EIGEN_MS, 3):
        curve = fit_eigen(rows, workers)
        slow = {row: max(worker_seconds(curve, w)) for row, w in workers.items()}
        five = [abs(1e3 * slow[row] / ms - 1) for row, ms in EIGEN_MS.items()]
        six = {
            row: abs(slow[row[0], 16] / slow[row] / known - 1)
            for row, known in SLOWEST_SPEEDUP.items()
        }
        table_v = statistics.median(five) < 0.10 and max(five) < 0.25
        rest = max(e for row, e in six.items() if row != CONTRADICTORY) < 0.15
        good["V"] += table_v
        good["VI"] += max(six.values()) < 0.1501
        good["VI but one"] += rest
        good["V and VI but one"] += table_v and rest
        design = {model for model, _ in rows}, {world for _, world in rows}
        if all(len(each) == 3 for each in design):
            worst = f"{max(five):.1%}, VI {max(six.values()):.1%}"
            rest_of = max(e for row, e in six.items() if row != CONTRADICTORY)
            print(f"  {rows}: V {statistics.median(five):.1%}, {worst}, {rest_of:.1%}")
    print(f"of 84 choices of three rows: {good}")


def training_minutes() -> None:
    """Table III."""
    profile = find_profile("frontera")
    for model, published in MINUTES.items():
        work = work_of(model)
        method = Method(placement="round_robin", gradients="ddp", policy=every(50, 500))
        for name, each, epochs, known in (
            ("sgd", SGD, 90, published[0]),
            ("kfac", method, 55, published[1]),
        ):
            seconds = simulate(work, profile, 64, each, Conditions(batch=BATCH)).seconds
            found = epochs * IMAGENET / (64 * BATCH) * seconds / 60
            print(
                f"Table III {model} {name}: {known} {found:.0f} "
                f"{found / known - 1:+.1%}"
            )


def hours(folder: Path) -> None:
    """Figure 7 to 9 and Table IV."""
    for model in MODELS:
        asked = SimulateCommand(
            model=model,
            norm="skip",
            profile="frontera",
            placement="round_robin",
            gradients="ddp",
            per_epoch=1.25,
            epochs=(90, 55, 55),
            world=(16, 32, 64, 128, 256),
            strategies=("sgd", "layer_wise", "factor_wise"),
        )
        results = run(asked)
        spent = hours_of(asked)
        found = {
            (r.strategy, r.world): spent[r.strategy] * r.seconds / r.world
            for r in results
        }
        for world in asked.world:
            saved = 1 - found["factor_wise", world] / found["sgd", world]
            least = 1 - found["layer_wise", world] / found["sgd", world]
            print(
                f"Table IV {model} {world:>4}: {IMPROVEMENT[model, world]:.1%} "
                f"model {saved:.1%}, layer_wise {least:.1%}; hours "
                + " ".join(f"{found[s, world]:.2f}" for s in asked.strategies)
            )
        if model == "resnet50":
            scaling_figure(results, folder / "hours.png", hours=spent)
            for name, known in EFFICIENCY.items():
                share = found[name, 16] / (8 * found[name, 128])
                print(f"efficiency 16 to 128 {name}: {known:.1%} model {share:.1%}")


def lower_bound(plan: Plan) -> float:
    """No placement of whole factors does better: max(total / world, largest)."""
    seconds = [plan.cost.invert(spec) for spec in plan.statistics]
    return max(sum(seconds) / plan.world, max(seconds, default=0.0))


def placements() -> None:
    """The slowest rank over the lower bound."""
    cost = find_profile("frontera").cost("eigen")
    for model in MODELS:
        cells: list[str] = []
        for world in (16, 32, 64, 128, 256):
            pair: list[str] = []
            for placement in ("longest_first", "round_robin"):
                plan = make_plan(
                    work_of(model).specs, world=world, placement=placement, costs=cost
                )
                pair.append(f"{max(inversion_loads(plan)) / lower_bound(plan):.2f}")
            cells.append(" / ".join(pair))
        print(f"placement {model}: " + " | ".join(cells))


def spngd() -> None:
    """Tables 1 and 2 of SP-NGD, and its superlinear region."""
    profile = find_profile("abci")
    conditions = Conditions(batch=BATCH, half=("share_updates",))

    def seconds(world: int, rate: float, norm: str = "unit") -> float:
        method = Method(
            strategy="spngd",
            placement="round_robin",
            inverse="factored",
            policy=reduced(rate),
        )
        work = work_of("resnet50", norm=norm)
        return simulate(work, profile, world, method, conditions).seconds

    for world, known in STEP_SECONDS.items():
        found = seconds(world, REDUCTION[world])
        faster = seconds(world, 1.0) / found
        print(
            f"SP-NGD {world:>5}: {known} {found:.3f} {found / known - 1:+.1%}  "
            f"{STALE_SPEEDUP[world]} {faster:.2f}"
        )
    full = [seconds(2**k, 1.0, "full") for k in (*range(7), 10)]
    print("SP-NGD full BatchNorm, 1 to 64 and 1,024:", *(f"{s:.3f}" for s in full))


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")
    eigen({row: worker_sizes(*row) for row in EIGEN_MS})
    training_minutes()
    hours(folder)
    placements()
    spngd()


if __name__ == "__main__":
    main()
