"""Tables, figures, verdict and page: from made-up curves and from a real study."""

import csv
import html
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from tests.lab.study.made import curve, falling, made_spec, trial

from natgrad_lab.study.curves import Trial
from natgrad_lab.study.figures import charts
from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import Point, points
from natgrad_lab.study.report import write_report, write_results
from natgrad_lab.study.results import Results, average, read_results
from natgrad_lab.study.tables import (
    best_table,
    cost_table,
    robustness_table,
    target_table,
)
from natgrad_lab.study.verdict import verdict

# Updates to halve the loss, by method and batch: SGD scales ideally to 256 and then
# hardly; K-FAC needs half as many at 64 and does not scale at all.
HALVING = {
    "sgd": {64: 160, 256: 40, 1024: 30},
    "kfac": {64: 80, 256: 79, 1024: 78},
}
# Processor seconds an update: fixed + example x batch
COST = {"sgd": (0.0, 0.001), "kfac": (0.5, 0.001)}


def made_trial(point: Point) -> Trial:
    """Ten points; a poor learning rate takes four times as long; one corner fails."""
    steps = HALVING[point.method][point.batch]
    rate = 1.0 if point.lr == 1.0 else 0.25
    fixed, example = COST[point.method]
    seconds = steps * (fixed + example * point.batch)
    corner = point.lr == 1.0 and point.other == 0.9 and point.batch == 1024
    made = curve(
        falling(rate)[: 3 if corner else 10],
        steps=steps,
        seconds=seconds,
        ending="diverged" if corner else "done",
    )
    return Trial(point=point, curve=made)


@pytest.fixture(scope="module")
def results() -> Results:
    found = tuple(made_trial(each) for each in points(made_spec()))
    return Results(
        spec=made_spec(),
        trials=found,
        single=found,
        keys=tuple(f"key{i}" for i in range(len(found))),
        attempts=(1,) * len(found),
        notes=("made-up data",) * len(found),
    )


def test_targets_come_from_the_worst_method_s_best_run(results: Results) -> None:
    # all best runs fall alike: 4, 2, 1, ... at epochs 1 to 10; decays at 4 and 8
    values = [each.value for each in results.targets("loss")]
    start, first, second, last = 4.0, 4 / 2**3, 4 / 2**7, 4 / 2**9
    assert values == pytest.approx(
        [
            start + 0.8 * (first - start),
            first + 0.8 * (second - first),
            second + 0.8 * (last - second),
        ]
    )


def test_iterations_and_speedups_to_the_last_target(results: Results) -> None:
    rows = [
        x for x in target_table(results) if (x["metric"], x["stage"]) == ("loss", 3)
    ]
    found = {(x["method"], x["batch"]): x for x in rows}
    assert len(rows) == 6
    # the target, 1.6 times the last loss, lies between the ninth point, 2, and that
    assert found["sgd", 64]["iterations"] == pytest.approx(160 * 9.4)
    assert found["sgd", 256]["speedup"] == pytest.approx(4.0)
    assert found["sgd", 1024]["speedup"] == pytest.approx(16 / 3)
    assert found["sgd", 1024]["efficiency"] == pytest.approx(1 / 3)
    assert found["kfac", 1024]["speedup"] == pytest.approx(80 / 78)
    assert found["sgd", 256]["examples"] == pytest.approx(40 * 9.4 * 256)
    assert found["kfac", 64]["cpu_seconds"] == pytest.approx(752 * 0.564)
    # on a cluster each worker has 64 examples, and the fixed part stays
    assert found["kfac", 1024]["cluster_seconds"] == pytest.approx(733.2 * 0.564)
    assert found["sgd", 1024]["cluster_seconds"] == pytest.approx(282 * 0.064)


def test_the_good_region_is_counted(results: Results) -> None:
    rows = {(x["method"], x["batch"]): x for x in robustness_table(results)}
    small, large = rows["sgd", 64], rows["sgd", 1024]
    assert (small["trials"], small["diverged"]) == (4, 0)
    assert small["good_at_end"] == 0.5  # the two of the good learning rate
    assert (large["diverged"], large["good_at_end"]) == (1, 0.25)
    assert large["lowest_accuracy"] == 0.0
    assert small["iterations"] == 780  # the least of the batches' longest runs
    assert small["good_in_iterations"] == 0.0  # four points, and it takes ten
    assert rows["sgd", 256]["good_in_iterations"] == 0.5
    assert large["good_in_iterations"] == 0.25


def worse_at_the_end(results: Results) -> Results:
    """The same trials, each with a last point that is as bad as the first."""
    worse = [
        replace(
            each,
            curve=replace(
                each.curve,
                losses=(*each.curve.losses[:-1], each.curve.losses[0]),
                accuracies=(*each.curve.accuracies[:-1], each.curve.accuracies[0]),
            ),
        )
        for each in results.trials
    ]
    return replace(results, trials=tuple(worse), single=tuple(worse))


def highest_colour(figure: Figure) -> float:
    found = [mesh for axis in figure.axes for mesh in axis.findobj(QuadMesh)]
    values = [np.asarray(x.get_array()) for x in found]
    return max(float(np.nanmax(x)) for x in values if x.shape == (2, 2))


def test_the_end_of_training_is_its_last_point(results: Results) -> None:
    """002: figures 5, 6 (a, d) and 10 are at the end; 2 and 9 are the best."""
    worse = worse_at_the_end(results)
    assert {x["highest_accuracy"] for x in robustness_table(worse)} == {60.0}
    assert max(x["accuracy"] for x in best_table(worse)) > 99
    found = {each.name: each for each in charts(worse)}
    assert highest_colour(found["figure-05-heatmaps"].make(worse)) == 60.0
    assert highest_colour(found["figure-09-heatmaps"].make(worse)) > 99
    for name in ("figure-06-robustness-kfac", "figure-10-damping"):
        axis = found[name].make(worse).axes[0]
        assert max(max(heights(line)) for line in axis.lines) == 60.0


def test_legends_name_stages_and_methods(results: Results) -> None:
    found = {each.name: each for each in charts(results)}
    for name in ("figure-03-iterations", "figure-04-speedup"):
        (legend,) = found[name].make(results).legends
        said = [text.get_text() for text in legend.get_texts()]
        assert said == ["SGD", "K-FAC", "target 1", "target 2", "target 3", "ideal"]


def test_costs_are_drawn_in_wall_clock_seconds_too(results: Results) -> None:
    found = {each.name: each for each in charts(results)}
    axes = found["figure-11-cost"].make(results).axes
    assert [axis.get_ylabel() for axis in axes[:4]] == [
        "examples to target",
        "wall-clock seconds",
        "processor seconds",
        "cluster seconds, 64 a worker",
    ]
    wall, processor = (heights(axis.lines[0]) for axis in axes[1:3])
    assert wall == pytest.approx([2 * x for x in processor])  # as made


def test_what_an_update_costs(results: Results) -> None:
    rows = {(x["method"], x["batch"]): x for x in cost_table(results)}
    assert rows["kfac", 64]["over_sgd"] == pytest.approx(0.564 / 0.064)
    assert rows["kfac", 64]["fixed_milliseconds"] == pytest.approx(500)
    assert rows["sgd", 64]["microseconds_an_example"] == pytest.approx(1000)


def test_the_best_configuration(results: Results) -> None:
    rows = best_table(results)
    assert {row["lr"] for row in rows} == {1.0}
    assert {row["by"] for row in rows} == {"loss", "accuracy"}


def test_the_verdict_says_where_scaling_ends(results: Results) -> None:
    said = "\n".join(verdict(results))
    assert re.search(r"SGD, to loss .*stops scaling after batch 256 \(4x of", said)
    assert re.search(r"K-FAC, to loss .*stops scaling after batch 64; at 256", said)
    assert "Relative to itself at batch 64 it scales no better than SGD" in said
    assert "8.8x at 64" in said
    assert "SGD's good region: 50 % at 64, 50 % at 256, 25 % at 1,024" in said


def test_the_verdict_leads_with_what_is_reached(results: Results) -> None:
    """K-FAC needs fewer iterations at 64 and scales worse: both are told, in order."""
    said = verdict(results)
    best = [i for i, text in enumerate(said) if "est test accuracy" in text]
    assert best == [1, 2, 3]
    assert said[1].startswith("Best test accuracy at the largest batch, 1,024: ")
    (both,) = [text for text in said if "scales no better" in text]
    assert both.startswith("K-FAC needs fewer iterations than SGD in 6 of 18")


def test_the_best_method_at_the_largest_batch_is_named_first(results: Results) -> None:
    def worse(each: Trial) -> Trial:
        lower = tuple(0.5 * x for x in each.curve.accuracies)
        return replace(each, curve=replace(each.curve, accuracies=lower))

    changed = tuple(worse(x) if x.method == "sgd" else x for x in results.trials)
    text = verdict(replace(results, trials=changed, single=changed))[1]
    assert text.index("K-FAC") < text.index("SGD")


def test_repeats_become_one_trial() -> None:
    seeds = [trial("sgd", 64, 0.1, curve([4.0 / (1 + s)]), seed=s) for s in range(2)]
    (mean,) = average(seeds)
    assert mean.curve.losses == (3.0,)


def heights(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def test_every_figure_of_the_paper_is_drawn(results: Results) -> None:
    found = {each.name: each for each in charts(results)}
    numbers = {int(name.split("-")[1]) for name in found}
    assert numbers == set(range(1, 12))
    axes = found["figure-03-iterations"].make(results).axes
    lines = [line for line in axes[0].lines if line.get_marker() == "^"]
    assert heights(lines[-1]) == pytest.approx([1504, 376, 282])
    dotted = [line for line in axes[0].lines if line.get_linestyle() == ":"]
    assert pytest.approx([1504, 376, 94]) in [heights(line) for line in dotted]
    boxes = found["figure-10-damping"].make(results).axes[0]
    assert len(boxes.get_xticks()) == 2
    heat = found["figure-09-heatmaps"].make(results).axes
    mesh = heat[2].collections[0].get_array()
    assert mesh is not None
    assert mesh.shape == (2, 2)
    assert math.isnan(
        float(np.ma.filled(mesh, math.nan)[1, 1])
    )  # the corner that diverged


@pytest.fixture(scope="module")
def page(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        # drawing is what takes time; `test_every_figure_is_written` has them all
        patch.setattr("natgrad_lab.study.report.charts", some)
        write_results(results, out)
    return out / "index.html"


def some(results: Results) -> list[Any]:
    return charts(results)[::5]


@pytest.mark.long
def test_every_figure_is_written(results: Results, tmp_path: Path) -> None:
    write_results(results, tmp_path)
    require_figures(tmp_path / "figures", [chart.name for chart in charts(results)])


def require_figures(folder: Path, names: list[str]) -> None:
    for name in names:
        png = folder / f"{name}.png"
        assert png.read_bytes().startswith(b"\x89PNG")
        assert "<svg" in png.with_suffix(".svg").read_text()


def test_files_of_a_report(page: Path, results: Results) -> None:
    require_figures(page.parent / "figures", [chart.name for chart in some(results)])
    for name in ("best", "targets", "robustness", "cost", "trials", "curves"):
        path = page.parent / "tables" / f"{name}.csv"
        with path.open() as file:
            rows = list(csv.DictReader(file))
        table = pq.read_table(path.with_suffix(".parquet"))
        assert table.num_rows == len(rows) > 0
        assert table.column_names == list(rows[0])


def test_the_page_needs_no_network(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:|//)", text)
    assert "@import" not in text
    assert text.count("<img") == text.count("data:image/svg+xml;base64,")


def test_a_report_of_a_real_study(
    trained: tuple[Ledger, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _ = trained
    # all of them are drawn above; drawing is what takes time
    monkeypatch.setattr("natgrad_lab.study.report.charts", lambda x: charts(x)[1:3])
    said = write_report(ledger, tmp_path)
    assert (
        "6 trials of digits-sgd on digits (scikit-learn) have ended; 2 of them diverged"
        in said
    )
    assert "digits (scikit-learn)" in (tmp_path / "tables" / "trials.csv").read_text()
    found = read_results(ledger)
    assert found.methods == ["sgd", "kfac"]
    assert all(each.curve.cpu_seconds for each in found.of("kfac"))
    assert (tmp_path / "index.html").stat().st_size > 30_000


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (Debian: chromium)"
)
CLICKS = """
<script>
const column = (id, name) => {
  const heads = [...document.querySelectorAll(`#${id} th`)];
  const index = heads.findIndex(each => each.textContent === name);
  heads[index].querySelector("button").click();
  const cells = [...document.querySelectorAll(`#${id} tbody tr`)];
  return cells.map(row => row.children[index].textContent).join(",");
};
const seen = ["iterations", "iterations", "method"].map(x => column("targets", x));
const images = [...document.images].every(each => each.naturalWidth > 0);
document.body.dataset.seen = JSON.stringify([seen, images]);
</script>
"""


def chromium(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--enable-logging=stderr", f"--user-data-dir={profile}"]
    command += ["--virtual-time-budget=5000", *options, page.as_uri()]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )


@needs_chromium
def test_the_page_in_a_browser(page: Path, tmp_path: Path) -> None:
    clicked = tmp_path / "clicked.html"
    text = page.read_text().replace("</body>", f"{CLICKS}</body>")
    clicked.write_text(text)
    done = chromium(clicked, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr
    (up, down, names), images = json.loads(html.unescape(found[1]))
    assert images
    numbers = [float(x) for x in up.split(",")]
    assert numbers == sorted(numbers)  # as numbers: 1600 after 300
    assert len(set(numbers)) > 3
    assert [float(x) for x in down.split(",")] == numbers[::-1]
    assert names.split(",") == sorted(names.split(","))


@needs_chromium
def test_a_console_error_would_be_seen(tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<!doctype html><script>nothing.here()</script>")
    done = chromium(broken, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" in done.stderr


@needs_chromium
def test_the_page_s_picture(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    options = ("--window-size=1200,3000", "--hide-scrollbars", f"--screenshot={shot}")
    done = chromium(page, tmp_path / "profile", *options)
    assert shot.is_file(), done.stderr
    with Image.open(shot) as image:
        assert image.size == (1200, 3000)
        colours = image.convert("RGB").getcolors(maxcolors=2**24)
    assert colours is not None
    assert len(colours) > 500  # text, lines and heatmaps, not a blank page
