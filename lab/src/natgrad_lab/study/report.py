"""`natgrad study report`: figures, tables and the page, all from the storage."""

import json
from pathlib import Path

from natgrad_lab.study.figures import charts, save
from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.page import page
from natgrad_lab.study.points import spec_to_plain
from natgrad_lab.study.results import Results, read_results
from natgrad_lab.study.tables import all_tables, write_csv, write_parquet
from natgrad_lab.study.verdict import verdict


def write_report(ledger: Ledger, out: Path) -> str:
    """Write everything into a folder; returns what to tell the user."""
    results = read_results(ledger)
    sentences = write_results(results, out)
    listed = "\n".join(f"- {each}" for each in sentences)
    return f"{listed}\nreport: {out / 'index.html'}"


def write_results(results: Results, out: Path) -> list[str]:
    """Figures, tables and page of finished trials; returns the verdict."""
    figures, data = out / "figures", out / "tables"
    for folder in (figures, data):
        folder.mkdir(parents=True, exist_ok=True)
    found = charts(results)
    for chart in found:
        save(chart.make(results), figures, chart.name)
    tables = all_tables(results)
    for name, rows in tables.items():
        write_csv(rows, data / f"{name}.csv")
        write_parquet(rows, data / f"{name}.parquet")
    sentences = verdict(results)
    title = f"Study {results.spec.name}: is it worth it at large batch?"
    spec = json.dumps(spec_to_plain(results.spec), indent=2)
    text = page(title, sentences, found, tables, spec, figures)
    (out / "index.html").write_text(text, encoding="utf-8")
    return sentences
