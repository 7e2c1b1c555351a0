"""The page of a run: what it flags, what it draws, and that a browser opens it."""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.construct import construct
from torch import nn

import natgrad
from natgrad_lab.cli import main
from natgrad_lab.inspect.flags import find_flags
from natgrad_lab.inspect.page import QUANTITIES, build, page_data
from natgrad_lab.inspect.records import (
    change_rates,
    mean_seconds,
    statistics_bytes,
    thin,
)
from natgrad_lab.train import run as runs
from natgrad_lab.train.config import OptimizerConfig, TrainConfig
from natgrad_lab.train.records import read_looks

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOOKS = ("estimate", "sampled", "reduce", "refresh", "invert", "precondition")
SECONDS = (*HOOKS, "step", "gradients", "update")
ODD = "</script><b>odd"


def block(**values: Any) -> dict[str, Any]:
    known: dict[str, Any] = {q.key: 0.1 for q in QUANTITIES}
    return known | {"damping_ratio": 0.01, "motion": 0.01, "angle": 30.0} | values


def statistic(kind: str, **values: Any) -> dict[str, Any]:
    known = {"kind": kind, "change": 0.2, "refreshed": 1, "packed_bytes": 1000}
    return known | values


def look(step: int, **layers: dict[str, Any]) -> dict[str, Any]:
    """A record with two calm layers and whatever a test adds."""
    blocks = {"calm": block(), ODD: block(), **layers}
    statistics = {f"{name}/A": statistic("A") for name in blocks}
    statistics |= {f"{name}/G": statistic("G", change=0.4) for name in blocks}
    statistics["bn/unit"] = statistic("unit", change=None)
    return {
        "step": step,
        "steps": 5 if step else 1,
        "world": 1,
        "seconds": {"all": 0.1, **dict.fromkeys(SECONDS, 0.01)},
        "traffic": dict.fromkeys(("reduce_statistics", "share_updates"), 512.0),
        "blocks": {**blocks, "plain": {"kl": 0.0}},
        "statistics": statistics,
    }


def looks(count: int = 8, **layers: dict[str, Any]) -> list[dict[str, Any]]:
    return [copy.deepcopy(look(5 * i, **layers)) for i in range(count)]


# -- flags --------------------------------------------------------------------------


def test_a_calm_run_has_no_flags() -> None:
    assert find_flags(looks()) == []


def test_a_swamped_layer_is_flagged() -> None:
    (flag,) = find_flags(looks(deep=block(damping_ratio=35.0, angle=0.25)))
    assert flag.level == "warning"
    assert flag.layers == ("deep",)
    assert flag.title == "The damping swamps the spectrum of deep"
    assert "35 times the largest eigenvalue" in flag.text
    assert "0.25 degrees" in flag.text


def test_a_layer_that_never_moves_is_flagged() -> None:
    (flag,) = find_flags(looks(stuck=block(motion=1e-9)))
    assert (flag.level, flag.layers) == ("warning", ("stuck",))
    assert flag.title == "The weights of stuck never moved"
    moved = looks(stuck=block(motion=1e-9))
    moved[3]["blocks"]["stuck"]["motion"] = 0.01
    assert find_flags(moved) == []
    unknown = looks(1, stuck=block(motion=None))
    assert find_flags(unknown) == []


def test_a_statistic_refreshed_at_every_step_is_flagged() -> None:
    records = looks()
    for record in records:
        record["statistics"]["calm/G"]["refreshed"] = record["steps"]
    (flag,) = find_flags(records)
    assert (flag.level, flag.layers) == ("note", ("calm",))
    assert flag.title == "calm/G is refreshed at every step"
    assert "40% of the step" in flag.text
    records[4]["statistics"]["calm/G"]["refreshed"] = 4
    assert find_flags(records) == []
    assert find_flags(looks(2)) == []  # too few steps to tell


def test_every_statistic_at_every_step_is_one_flag() -> None:
    records = looks()
    for record in records:
        for s in record["statistics"].values():
            s["refreshed"] = record["steps"]
    (flag,) = find_flags(records)
    assert flag.title == "Every statistic is refreshed at every step"


def test_stale_statistics_are_flagged() -> None:
    (flag,) = find_flags(looks(fast=block(change=1.7)))
    assert flag.title == "The statistics of fast are stale"


def test_what_a_budget_says_is_passed_on() -> None:
    records = looks()
    records[-1]["budget"] = {"says": "Gave up.", "overhead": 0.1, "preconditioning": 0}
    (flag,) = find_flags(records)
    assert (flag.level, flag.text) == ("note", "Gave up.")
    records[-1]["budget"]["preconditioning"] = 0.2
    assert find_flags(records)[0].level == "warning"


# -- tables -------------------------------------------------------------------------


def test_change_rates_are_percentiles_over_layers() -> None:
    source = torch.Generator().manual_seed(0)
    values = torch.rand(17, generator=source, dtype=torch.float64)
    record = look(5)
    record["statistics"] = {
        f"{i}/A": statistic("A", change=float(v)) for i, v in enumerate(values)
    }
    record["statistics"]["old/A"] = statistic("A", change=99.0, refreshed=0)
    shares = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    (row,) = change_rates([record])["A"]
    assert row == pytest.approx([5, *torch.quantile(values, shares).tolist()])


def test_bytes_and_seconds_are_a_step() -> None:
    first, second = look(0), look(5)
    second["seconds"]["invert"] = 0.05
    rows = statistics_bytes([first, second])
    assert rows[1] == {"step": 5, "A": 400.0, "G": 400.0, "norm": 200.0}
    assert mean_seconds([first, second])["invert"] == 0.05


def test_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    lines = [json.dumps(look(step)) for step in (0, 5, 10, 5, 10, 15)]
    (tmp_path / "diagnostics.jsonl").write_text("\n".join([*lines, '{"step": 2']))
    assert [r["step"] for r in read_looks(tmp_path)] == [0, 5, 10, 15]


def test_many_looks_are_thinned_out() -> None:
    kept = [r["step"] for r in thin([{"step": i} for i in range(1000)], 50)]
    assert len(kept) == 50
    assert (kept[0], kept[-1]) == (0, 999)


def test_the_page_has_layers_that_have_statistics() -> None:
    data = page_data("run", "kfac+sgd", looks())
    assert data["layers"] == ["calm", ODD]
    assert {len(q["rows"]) for q in data["quantities"]} == {2}
    assert {len(row) for q in data["quantities"] for row in q["rows"]} == {8}


# -- the page -----------------------------------------------------------------------


def page_of(folder: Path, optimizer: OptimizerConfig) -> str:
    """The page that the command writes of a run with this optimizer."""
    runs.create(folder, "run", TrainConfig(optimizer=optimizer))
    lines = [json.dumps(each) for each in looks()]
    (folder / "diagnostics.jsonl").write_text("\n".join(lines))
    assert main(["inspect", str(folder)]) == 0
    return (folder / "inspect.html").read_text()


def test_the_page_claims_a_bound_only_where_there_is_one(tmp_path: Path) -> None:
    kfac = page_of(tmp_path / "kfac", OptimizerConfig(kfac=True))
    polar = page_of(tmp_path / "polar", OptimizerConfig(name="polar"))
    claim = "At most 1 over the layer's own damping"
    assert (claim in kfac, claim in polar) == (True, False)
    assert "The rule sets the length" in polar


def test_the_claimed_bound_holds() -> None:
    """And without the inverse's bound it would not: Polar's updates are longer."""
    torch.manual_seed(0)
    worst: dict[str, float] = {}
    for name in ("kfac", "polar"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        if name == "polar":
            optimizer = watched = natgrad.Polar(model, lr=0.01)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            watched = natgrad.KFAC(model, optimizer, damping=1e-3)
        watched.watch(every=1)
        nn.functional.mse_loss(model(torch.randn(9, 6)), torch.randn(9, 3)).backward()
        optimizer.step()
        blocks = watched.diagnostics()["blocks"].values()
        worst[name] = max(each["norm_ratio"] * each["damping"] for each in blocks)
    assert worst["kfac"] <= 1 + 1e-5
    assert worst["polar"] > 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "line 3 is damaged"),
        ('{"step": 1}', r"line 3 is damaged.*\n.*Missing key 'steps'"),
        ('{"step": 1,,}', "line 3 is damaged"),
    ],
)
def test_a_damaged_line_is_named(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.create(tmp_path, "run", TrainConfig(optimizer=OptimizerConfig(kfac=True)))
    lines = [json.dumps(each) for each in looks(2)]
    (tmp_path / "diagnostics.jsonl").write_text("\n".join([*lines, line]))
    assert main(["inspect", str(tmp_path)]) == 2
    assert re.search(rf"diagnostics\.jsonl, {said}", capsys.readouterr().err)


def test_the_page_needs_no_network() -> None:
    page = build("run", "spngd", looks())
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert page.count("</script>") == 2  # names of layers do not end it


def chromium(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}"]
    return subprocess.run(
        [*command, *flags, page.as_uri()], capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    records = looks(deep=block(damping_ratio=35.0, kl=None), zero=block(kl=0.0))
    for record in records:
        record["world"] = 2
    page = tmp_path / "inspect.html"
    page.write_text(build("a <run>", "spngd", records), encoding="utf-8")
    done = chromium(page, "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    assert 'data-ready="yes"' in done.stdout  # the script ran to its end
    assert "<title>a &lt;run&gt; · natgrad inspect</title>" in done.stdout
    assert "The damping swamps the spectrum of deep" in done.stdout
    # a heatmap a quantity, change rates of A and G, two panels of traffic
    assert done.stdout.count("<canvas") == len(QUANTITIES) + 2 + 2


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_an_error_on_the_page_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    broken = build("run", "spngd", looks()).replace('"steps":[', '"stops":[')
    page.write_text(broken, encoding="utf-8")
    done = chromium(page, "--dump-dom")
    assert "CONSOLE" in done.stderr
    assert 'data-ready="yes"' not in done.stdout


# -- real runs ----------------------------------------------------------------------


def trained(out: Path, steps: int, *options: str) -> list[dict[str, Any]]:
    quick = ["--steps", str(steps), "--batch", "64", "--model.width", "4"]
    assert main(["train", "digits-kfac", *quick, *options, "--out", str(out)]) == 0
    return read_looks(out)


def inspected(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `natgrad inspect` prints of a run."""
    capsys.readouterr()
    assert main(["inspect", str(run)]) == 0
    return capsys.readouterr().out


def test_train_then_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    budget = ("--refresh.kind", "budget", "--refresh.overhead", "0.2")
    found = trained(run, 4, "--diagnostics", "2", *budget, "--tensorboard")
    assert [r["step"] for r in found] == [0, 2]
    assert "What the budget bought" in inspected(run, capsys)
    page = run / "inspect.html"
    assert "layer1.0.conv1" in page.read_text(encoding="utf-8")
    read_back(run / "tensorboard", found)


def read_back(folder: Path, records: list[dict[str, Any]]) -> None:
    """TensorBoard sees the numbers that the records have."""
    events = EventAccumulator(str(folder)).Reload()
    for key in ("angle", "damping_ratio", "bytes"):
        points = events.Scalars(f"diagnostics/{key}/layer1.0.conv1")
        known = [r["blocks"]["layer1.0.conv1"][key] for r in records]
        assert [point.step for point in points] == [0, 2]
        assert [point.value for point in points] == pytest.approx(known)
    assert len(events.Scalars("train/loss")) == 1


def test_a_run_with_far_too_much_damping_is_flagged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--curvature.damping", "1e4", "--diagnostics", "4")
    found = trained(tmp_path / "run", 25, *options, "--refresh.statistics", "1")
    shown = inspected(tmp_path / "run", capsys)
    layers = sum("largest" in block for block in found[-1]["blocks"].values())
    kinds = len(change_rates(found))
    assert f"The damping swamps the spectrum of all {layers} layers" in shown
    assert "Every statistic is refreshed at every step" in shown
    assert "never moved" not in shown
    if CHROMIUM is not None:
        drawn = chromium(tmp_path / "run" / "inspect.html", "--dump-dom")
        assert "CONSOLE" not in drawn.stderr, drawn.stderr
        assert 'data-ready="yes"' in drawn.stdout
        assert "<title>digits-kfac · natgrad inspect</title>" in drawn.stdout
        assert f"The damping swamps the spectrum of all {layers}" in drawn.stdout
        assert "layer1.0.conv1" in drawn.stdout
        # heatmaps, change rates by kind, bytes of statistics
        assert drawn.stdout.count("<canvas") == len(QUANTITIES) + kinds + 1


def watched(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, **options: Any
) -> list[dict[str, Any]]:
    """The looks at 30 steps of K-FAC, every fifth."""
    records: list[dict[str, Any]] = []
    with construct(natgrad.KFAC, model, optimizer, **options) as kfac:
        kfac.watch(every=5, sink=records.append)
        for step in range(30):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
    return records


def test_a_group_without_a_learning_rate_is_flagged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    still = {"params": [*model[0].parameters()], "lr": 0.0}
    optimizer = torch.optim.SGD([still, {"params": [*model[2].parameters()]}], lr=0.1)
    x, y = torch.randn(64, 6), torch.randint(3, (64,))
    records = watched(
        model, optimizer, lambda _: nn.functional.cross_entropy(model(x), y)
    )
    flags = {flag.title: flag for flag in find_flags(records)}
    flag = flags["The weights of 0 never moved"]
    assert (flag.level, flag.layers) == ("warning", ("0",))
    assert "learning rate of zero" in flag.text


def test_a_layer_that_never_settles_is_flagged_alone() -> None:
    """The inputs of one layer change from step to step; nothing else does."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"wild": nn.Linear(4, 2), "calm": nn.Linear(4, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, weights = torch.randn(64, 4), torch.randn(64, 2)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, scale: float) -> torch.Tensor:
            wild, calm = self.parts["wild"](scale * x), self.parts["calm"](x)
            return (weights * (wild + calm)).sum(1).mean()

    net = Both()
    records = watched(
        net,
        optimizer,
        lambda step: net(2.0 if step % 2 else 0.5),
        refresh=natgrad.Adaptive(tolerance=0.1),
        factor_decay=0.0,
        damping=0.1,
    )
    (flag,) = [f for f in find_flags(records) if "at every step" in f.title]
    assert (flag.level, flag.layers) == ("note", ("parts.wild",))
    assert "parts.wild/A" in flag.title


def test_without_diagnostics_it_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    quick = ["--steps", "1", "--batch", "32", "--model.width", "4", "--out", str(run)]
    assert main(["train", "digits-sgd", *quick]) == 0
    assert main(["inspect", str(run)]) == 2
    assert "Train with --diagnostics STEPS" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"diagnostics=5.*spngd, polar or has kfac"):
        TrainConfig(diagnostics=5)
