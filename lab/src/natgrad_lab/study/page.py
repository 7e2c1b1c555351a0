"""One HTML page with everything in it: it opens without a network."""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from natgrad_lab.study.figures import Chart
from natgrad_lab.study.tables import Row

TITLES = {
    "best": "Best configuration of each method and batch size",
    "targets": "Cost to each target",
    "robustness": "How many configurations are good",
    "cost": "What an update costs",
    "trials": "All trials",
}
NOTES = {
    "targets": "Iterations, examples and seconds are each the least over all "
    "configurations. Cluster seconds: iterations times the time of an update when "
    "workers take a base batch each, without communication.",
    "cost": "Processor time, medians; the fixed part and the part an example are a "
    "straight line through them.",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem;
  padding: 0 1rem; color: #1a1a1a; background: #fff; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; }
figcaption { color: #444; font-size: 0.93em; }
.scroll { overflow: auto; max-height: 32rem; border: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 0.87em; width: 100%; }
th, td { padding: 0.25rem 0.6rem; text-align: right; border-bottom: 1px solid #eee;
  white-space: nowrap; }
th { position: sticky; top: 0; background: #f4f4f4; padding: 0; }
th button { font: inherit; font-weight: 600; border: 0; background: none; width: 100%;
  padding: 0.35rem 0.6rem; cursor: pointer; text-align: right; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
pre { background: #f6f6f6; padding: 0.8rem; overflow: auto; font-size: 0.87em; }
.verdict { background: #f2f6fb; border-left: 4px solid #1b6ca8;
  padding: 0.6rem 1rem 0.6rem 2rem; }
"""
SCRIPT = """
document.querySelectorAll("th button").forEach(button => {
  button.addEventListener("click", () => {
    const head = button.parentElement, row = head.parentElement;
    const body = head.closest("table").tBodies[0];
    const column = [...row.children].indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending";
    [...row.children].forEach(each => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = line => line.children[column].dataset.value;
    const compare = (a, b) => {
      const x = key(a), y = key(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const both = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
      const order = both ? x - y : x.localeCompare(y);
      return up ? order : -order;
    };
    [...body.rows].sort(compare).forEach(line => body.append(line));
  });
});
"""


def page(
    title: str,
    sentences: Sequence[str],
    charts: Sequence[Chart],
    tables: Mapping[str, Sequence[Row]],
    spec: str,
    folder: Path,
) -> str:
    """The page.

    Args:
        title: of the study.
        sentences: the verdict.
        charts: the figures; their SVG files are in ``folder``.
        tables: rows by name; those without a title are left to the files.
        spec: the specification, as text.
    """
    verdict = "".join(f"<li>{html.escape(each)}</li>" for each in sentences)
    figures = "".join(_figure(each, folder) for each in charts)
    shown = "".join(_section(name, tables[name]) for name in TITLES)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><h2>Verdict</h2>"
        f'<ul class="verdict">{verdict}</ul>'
        f"<h2>Figures</h2>{figures}{shown}"
        f"<h2>Specification</h2><pre>{html.escape(spec)}</pre>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _figure(chart: Chart, folder: Path) -> str:
    data = base64.b64encode((folder / f"{chart.name}.svg").read_bytes()).decode()
    caption = html.escape(chart.caption)
    return (
        f'<figure id="{chart.name}"><img alt="{caption}" '
        f'src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _section(name: str, rows: Sequence[Row]) -> str:
    note = f"<p>{html.escape(NOTES[name])}</p>" if name in NOTES else ""
    return f"<h2>{html.escape(TITLES[name])}</h2>{note}{table(name, rows)}"


def table(name: str, rows: Sequence[Row]) -> str:
    """A table whose columns sort when their heads are clicked."""
    if not rows:
        return "<p>Nothing to show.</p>"
    heads = "".join(
        f"<th><button type=button>{html.escape(each.replace('_', ' '))}</button></th>"
        for each in rows[0]
    )
    body = "".join(
        f"<tr>{''.join(_cell(value) for value in row.values())}</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table id="{name}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    missing = value is None or (isinstance(value, float) and not math.isfinite(value))
    if missing:
        return '<td data-value="">-</td>'
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f'<td data-value="{html.escape(str(value))}">{html.escape(shown)}</td>'
