"""Step cost and state of every rule beside its public implementation, in one run.

    python -m benchmarks.cost                      # both networks, about five minutes
    python -m benchmarks.cost --only gpt --dion PATH_OF_A_CHECKOUT
    python -m benchmarks.cost --quick              # one round: does it run?

One thread, CPU seconds, contenders take turns (see Note [Interleaving] in common.py). A
network that `results/cost.json` has already, of this commit, is not measured again
unless `--fresh`. Writes `cost.json` and `cost.md`.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import CASES, Case, cross_entropy
from benchmarks.common import (
    BASELINE,
    RESULTS,
    describe,
    interleave,
    keep_memory,
    machine,
    markdown_table,
    megabytes,
    say,
    summarise,
    tensor_bytes,
    write_json,
)
from benchmarks.cost.contenders import Made, makers

NETWORKS = ("resnet20", "gpt")
HEAD = ("", "ratio to SGD", "spread", "full step", "state, MB", "GFLOP", "operations")
METHOD = """\
Each ratio is a training step (forward, backward, update) over one of SGD with momentum
in the same round: CPU seconds of one thread, the median over rounds and its quartiles.
Where bases, roots or inverses are refreshed every ten steps, the mean over those ten;
*full step* is the one that refreshes. Hidden matrices and convolutions follow the
rule, everything else AdamW. Peers see convolutions as matrices and iterate in float32,
as on a CPU natgrad does. *state* is all that the optimizer keeps, momentum included.
*GFLOP* and *operations* are the products and the calls of torch's operators in one
update that refreshes nothing, forward and backward apart (decompositions are not
counted)."""


def added(total: Any, left: Any, right: Any, **_: Any) -> int:
    """FLOP of a product that is added in place, from shapes."""
    return 2 * math.prod(left) * right[-1]


IN_PLACE = {torch.ops.aten.addmm_: added, torch.ops.aten.baddbmm_: added}
"""Products that torch's counter leaves out."""


class Operations(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(made: Made) -> dict[str, float]:
    """Of one update that refreshes nothing: the last kind of a round."""
    contender, (x, y) = made.contender, made.case.batches()[0]
    for kind in contender.kinds[:-1]:
        contender.prepare(kind)
        contender.step()
    contender.prepare(contender.kinds[-1])
    made.optimizer.zero_grad()
    cross_entropy(made.model(x), y).backward()
    flops = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with flops, Operations() as operations:
        made.optimizer.step()
    return {"flops": flops.get_total_flops(), "operations": operations.count}


def measure(name: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """One network."""
    everyone: list[Made] = []
    for make in makers(options.dion):
        try:
            everyone.append(make(case))
        except ImportError as error:
            say(f"  left out: {error}")
    contenders = [made.contender for made in everyone]
    samples = interleave(
        contenders,
        seconds=options.seconds,
        least=1 if options.quick else 3,
        most=1 if options.quick else 60,
        say=lambda text: say(f"  {text}"),
    )
    rows = summarise(samples, contenders, "cpu")
    known = {made.contender.name: made for made in everyone}
    for row in rows:
        made = known[row["contender"]]
        row["state"] = tensor_bytes(made.contender.state())
        row |= counted(made)
    return {"case": name, "label": case.label, "batch": case.batch, "rows": rows}


def table(case: dict[str, Any]) -> str:
    """A network's rows."""
    base = next(r["seconds"] for r in case["rows"] if r["contender"] == BASELINE)
    cells = [
        (
            row["contender"],
            f"{row['ratio']:.2f}",
            f"{row['low']:.2f} - {row['high']:.2f}",
            f"{max(row['kinds'].values()) / base:.2f}",
            megabytes(row["state"]),
            f"{row['flops'] / 1e9:.2f}",
            f"{row['operations']:,}",
        )
        for row in case["rows"]
    ]
    title = f"## {case['label']}, batch {case['batch']}"
    return (
        f"{title}\n\nAn SGD step takes {base:.3f} s.\n\n{markdown_table(HEAD, cells)}"
    )


def main() -> None:
    """Measure what is missing, write all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--seconds", type=float, default=140.0, help="a network")
    parser.add_argument("--dion", help="a checkout of microsoft/dion")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--fresh", action="store_true", help="measure all again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    keep_memory("benchmarks.cost")
    torch.set_num_threads(1)
    path, facts = options.out / "cost.json", machine()
    found: dict[str, Any] = {"machine": facts, "cases": {}}
    if path.exists() and not options.fresh:
        old = json.loads(path.read_text())
        same = old["machine"].get("commit") == facts["commit"] is not None
        found["cases"] = old["cases"] if same else {}
    for name in options.only:
        if name in found["cases"]:
            say(f"{name} is known")
            continue
        say(f"{CASES[name].label}, batch {CASES[name].batch}")
        found["cases"][name] = measure(name, CASES[name], options)
        write_json(path, found)
    tables = [table(case) for case in found["cases"].values()]
    text = "\n\n".join(["# What a rule costs", describe(facts), METHOD, *tables])
    (options.out / "cost.md").write_text(text + "\n")
    say(text)


if __name__ == "__main__":
    main()
