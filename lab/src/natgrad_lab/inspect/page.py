"""One HTML page with everything in it: opens without a network."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from natgrad_lab.inspect.flags import find_flags
from natgrad_lab.inspect.records import (
    change_rates,
    column,
    layers,
    mean_seconds,
    statistics_bytes,
    thin,
)
from natgrad_lab.train.records import Record

TEMPLATE = Path(__file__).with_name("page.html")
DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What a heatmap shows: ``log`` colours by the logarithm."""

    key: str
    title: str
    explain: str
    log: bool = True
    unit: str = ""


QUANTITIES = (
    Quantity(
        key="damping_ratio",
        title="Damping against the largest eigenvalue",
        explain="Above 1 the damping outweighs all curvature.",
    ),
    Quantity(
        key="above_damping",
        title="Share of eigenvalues above the damping",
        explain="How much of the spectrum preconditioning sees.",
        log=False,
    ),
    Quantity(
        key="angle",
        title="Angle between gradient and preconditioned gradient",
        explain="Near 0 preconditioning only scales.",
        log=False,
        unit="°",
    ),
    Quantity(
        key="norm_ratio",
        title="Norm of the preconditioned gradient over the gradient's",
        explain="At most 1 over the layer's own damping.",
    ),
    Quantity(
        key="change",
        title="Change of the statistics at the last refresh",
        explain="Relative, in the Frobenius norm; the larger of a layer's factors.",
    ),
    Quantity(
        key="age",
        title="Steps since the last refresh",
        explain="The older of a layer's factors.",
        log=False,
    ),
    Quantity(
        key="kl",
        title="KL divergence of the step",
        explain="lr² times the product of gradient and preconditioned gradient.",
    ),
    Quantity(
        key="motion",
        title="Motion of the weights",
        explain="Relative change since the measurement before.",
    ),
    Quantity(
        key="largest", title="Largest eigenvalue", explain="Of the layer's Fisher."
    ),
    Quantity(key="median", title="Median eigenvalue", explain="Of the layer's Fisher."),
    Quantity(
        key="effective_rank",
        title="Effective rank",
        explain="(Σv)² / Σv²: how many directions carry the curvature.",
    ),
    Quantity(
        key="condition",
        title="Condition number",
        explain="Of what is inverted: damping included.",
    ),
    Quantity(
        key="time_share",
        title="Share of the step's time",
        explain="Estimates, inversions and preconditioning of the layer.",
        log=False,
    ),
    Quantity(
        key="bytes_share",
        title="Share of the bytes kept",
        explain="Averages and inverses of the layer, on all ranks.",
        log=False,
    ),
)


UNBOUNDED = "The rule sets the length of an update, whatever the gradient's is."
"""Of ``norm_ratio``, where a rule does more than multiply by a damped inverse."""


def build(
    name: str, label: str, records: Sequence[Record], *, bounded: bool = True
) -> str:
    """The page of a run: ``label`` names its method.

    ``bounded`` says whether its rule is a damped inverse, which lengthens no gradient
    by more than 1 / damping.
    """
    data = page_data(name, label, records, bounded=bounded)
    text = json.dumps(data, separators=(",", ":"))
    # a script element ends at the first closing tag, also inside of a string
    text = text.replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", text)


def page_data(
    name: str, label: str, records: Sequence[Record], *, bounded: bool = True
) -> dict[str, Any]:
    """All that the page draws."""
    shown, last = thin(records), records[-1]
    names = layers(records)
    data = {
        "name": name,
        "label": label,
        "world": last["world"],
        "steps": [r["step"] for r in shown],
        "looks": len(records),
        "layers": names,
        "flags": [asdict(flag) for flag in find_flags(records)],
        "quantities": [
            asdict(q) | {"rows": [column(shown, each, q.key) for each in names]}
            for q in _quantities(bounded)
        ],
        "changes": change_rates(shown),
        "bytes": statistics_bytes(shown),
        "traffic": [r["traffic"] | {"step": r["step"]} for r in shown],
        "seconds": mean_seconds(records),
    }
    return _rounded(data)


def _quantities(bounded: bool) -> list[Quantity]:
    return [
        q if bounded or q.key != "norm_ratio" else replace(q, explain=UNBOUNDED)
        for q in QUANTITIES
    ]


def _rounded(tree: Any) -> Any:
    """Enough digits for a picture."""
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_rounded(value) for value in tree]
    return float(f"{tree:.{DIGITS}g}") if isinstance(tree, float) else tree
