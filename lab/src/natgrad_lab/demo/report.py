"""What the demo's races say: a table, a figure and a sentence for each task."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from natgrad_lab.demo.race import CONTENDERS, Race
from natgrad_lab.demo.tasks import TASKS


def best_rival(races: Sequence[Race]) -> Race:
    """The one of the others' that ends lowest: its final value is to be reached."""
    others = [r for r in races if not CONTENDERS[r.contender].ours]
    return min(others, key=lambda r: r.final)


HEADS = ("optimizer", "rate", "final loss", "steps to *", "s to *", "s in all")
"""Of the table; "*" is the best rival, whose final loss is to be reached."""


def table_of(found: Mapping[str, Sequence[Race]]) -> Table:
    """Each optimizer's loss at the end, and when it had that of the best rival."""
    table = Table()
    for head in HEADS:
        table.add_column(head, justify="left" if head == "optimizer" else "right")
    for name, races in found.items():
        goal = best_rival(races)
        table.add_section()
        table.add_row(f"[bold]{name}[/bold]", *[""] * (len(HEADS) - 1))
        for each in sorted(races, key=lambda r: r.final):
            reached = each.reaches(goal.final)
            table.add_row(
                f"  {each.contender}{' *' if each is goal else ''}",
                "found" if each.rate is None else f"{each.rate:g}",
                f"{each.final:.3g}",
                "-" if reached is None else str(reached[0]),
                "-" if reached is None else f"{reached[1]:.1f}",
                f"{each.seconds[-1]:.1f}",
            )
    table.caption = (
        "* the best of SGD, AdamW, Muon and SOAP; steps and seconds (s) to *\n"
        "are those after which an optimizer had reached its final loss"
    )
    return table


def sentences(found: Mapping[str, Sequence[Race]]) -> Iterator[str]:
    """What was seen, task by task, whatever it was."""
    for name, races in found.items():
        goal = best_rival(races)
        ours = [r for r in races if CONTENDERS[r.contender].ours]
        best = min(ours, key=lambda r: r.final)
        reached = best.reaches(goal.final)
        task = f"On the task {name}, {best.contender}"
        if reached is None:
            yield (
                f"{task} ends at {best.final:.3g}, behind {goal.contender} at "
                f"{goal.final:.3g}."
            )
            continue
        steps, seconds = reached
        yield (
            f"{task} reaches the final loss of {goal.contender}, {goal.final:.3g}, "
            f"after {steps} of {goal.steps[-1]} steps and {seconds:.1f} s (it took "
            f"{goal.seconds[-1]:.1f} s), and ends at {best.final:.3g}."
        )


def draw(found: Mapping[str, Sequence[Race]], path: Path) -> Path:
    """Values over steps, and over seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found), 6.5), layout="constrained")
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, (name, races) in enumerate(found.items()):
        for index, each in enumerate(races):
            style = {"color": f"C{index}", "label": each.contender}
            style["linestyle"] = "-" if CONTENDERS[each.contender].ours else "--"
            axes[0][column].plot(each.steps, each.values, **style)
            axes[1][column].plot(each.seconds, each.values, **style)
        lowest = min(min(r.values) for r in races)
        for axis, x in zip(axes[:, column], ("steps", "seconds"), strict=True):
            axis.set_yscale("log")
            axis.set_ylim(lowest / 1.3, max(r.values[0] for r in races) * 1.3)
            axis.set_xlabel(x)
            axis.grid(alpha=0.25)
        axes[0][column].set_title(f"{name}: {TASKS[name].unit}", fontsize="medium")
    axes[0][0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
