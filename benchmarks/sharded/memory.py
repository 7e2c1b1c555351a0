"""Bytes that an optimizer keeps of a sharded transformer, as `natgrad plan` has them.

python -m benchmarks.sharded.memory
"""

from collections.abc import Mapping, Sequence

from natgrad.plan import Plan, size_text
from natgrad_lab.simulate.asked import options_asked, rules_asked, work_asked
from natgrad_lab.simulate.memory import keeps_of, memory_by_rank
from natgrad_lab.simulate.plan_command import PlanCommand, plan_asked

MODELS = {
    "1B": "one_billion",
    "8B": "eight_billion",
    "small": "small",
    "tiny": "tiny",
}
METHODS = {
    "Polar": "polar",
    "Muon": "muon",
    "Shampoo": "shampoo",
    "KFAC on SGD": "kfac",
}
STATE = ("statistics", "history", "inverses", "moments", "momentum")
WORLDS = (8, 64)
INPUT = 16
"""Words of an example; only activations, which are left out here, depend on it."""


def planned(
    model: str, method: str, world: int
) -> tuple[Plan, list[Mapping[str, int]]]:
    """The plan, and bytes by rank, as the command makes them."""
    asked = PlanCommand(
        import_=f"benchmarks.sharded.models:{MODELS[model]}",
        input=(INPUT,),
        method=method,  # pyright: ignore[reportArgumentType]
        gradients="sharded",
        world=world,
        batch_per_rank=1,
    )
    options = options_asked(asked)
    work = work_asked(asked, options, rules_asked(asked, asked.rules))
    plan = plan_asked(asked, options, work, None, None)
    sharded = method != "kfac"
    rows = memory_by_rank(
        plan,
        work,
        1,
        keeps=keeps_of(options, work.ruled),
        sharded=sharded,
        cut=not (sharded and options.average.keeps_mass),
    )
    return plan, [*rows]


def state(row: Mapping[str, int]) -> int:
    """What an optimizer keeps between steps, without weights and gradients."""
    return sum(row[part] for part in STATE)


def line(model: str, name: str, found: Sequence[Sequence[int]]) -> str:
    """A row of the table: the rank with the most and the mean, for each world."""
    cells = (
        f"{size_text(max(sizes))} | {size_text(sum(sizes) // len(sizes))}"
        for sizes in found
    )
    return f"| {model} | {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table of `docs/sharded.md`."""
    worlds = " | ".join(f"{w} ranks: most | mean" for w in WORLDS)
    print(f"| model | optimizer | {worlds} |")
    print("|---|---|---|---|---|---|")
    for model in ("1B", "8B"):
        adam: list[list[int]] = []
        for name, method in METHODS.items():
            rows = [planned(model, method, world)[1] for world in WORLDS]
            adam = [[2 * row["weights"] for row in each] for each in rows]
            print(line(model, name, [[*map(state, each)] for each in rows]))
        print(line(model, "AdamW", adam))


if __name__ == "__main__":
    main()
