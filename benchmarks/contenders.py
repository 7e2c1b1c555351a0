"""Who competes: torch's optimizers, natgrad, and others' work where it is installed."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer

import natgrad
from benchmarks.cases import Case, cross_entropy
from benchmarks.common import (
    ADAPTIVE,
    BASELINE,
    EVERY_STEP,
    FULL,
    PLAIN,
    REFRESHING,
    STATISTICS,
    Contender,
)
from natgrad_lab.train import methods
from natgrad_lab.train.config import OptimizerConfig, TrainConfig

LR = 1e-3
CYCLE = (FULL, STATISTICS, PLAIN, PLAIN, PLAIN)
"""Plain steps are most of what `10/100` costs: they are measured more often."""

ADAPTIVE_STEPS = 4
"""Steps of the adaptive policy in each round: its intervals must have time to grow."""

PEER_ROUNDS = 2
"""Slow peers sit out after so many rounds, which leaves the time to the others."""

SLOW_PEER_ROUNDS = 1

Maker = Callable[[Case, str], Contender]


def cycle(kinds: tuple[str, ...] = CYCLE) -> natgrad.Every:
    """A policy whose steps are of the given kinds, in turn; the first must be full."""

    def until(step: int, wanted: tuple[str, ...]) -> int:
        count = len(kinds)
        return next(
            i for i in range(1, count + 1) if kinds[(step + i) % count] in wanted
        )

    return natgrad.Every(
        statistics=lambda step: until(step, (FULL, STATISTICS)),
        inverses=lambda step: until(step, (FULL,)),
    )


def training_step(
    model: nn.Module, optimizer: Optimizer, case: Case, layout: str
) -> Callable[[], None]:
    """Forward, backward and update on the next batch."""
    batches = itertools.cycle(case.batches(layout))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _plain(
    name: str, make: Callable[[nn.Module], Optimizer], max_rounds: int = 1000
) -> Maker:
    def maker(case: Case, layout: str) -> Contender:
        model = case.model(layout)
        optimizer = make(model)
        step = training_step(model, optimizer, case, layout)
        return Contender(
            name=name,
            step=step,
            max_rounds=max_rounds,
            state=lambda: state_of(optimizer),
        )

    return maker


def state_of(optimizer: Any) -> list[Any]:
    """Everything an optimizer keeps, and those inside it."""
    inside = [part for part, _ in getattr(optimizer, "_parts", ())]
    inside += [optimizer._inner] if hasattr(optimizer, "_inner") else []
    return [dict(optimizer.state), *(x for each in inside for x in state_of(each))]


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def _muon(model: nn.Module) -> Optimizer:
    config = TrainConfig(optimizer=OptimizerConfig(name="muon", lr=LR, momentum=0.95))
    return methods.make(model, config, examples=1).optimizer


# -- natgrad --------------------------------------------------------------------------


def _kfac(style: Any, basis: Any = "exact") -> Maker:
    def maker(case: Case, layout: str) -> Contender:
        model = case.model(layout)
        optimizer = _sgd(model)
        kfac = natgrad.KFAC(
            model,
            optimizer,
            rule=natgrad.Kronecker(style=style, basis=basis),
            refresh=cycle(),
            loss=case.loss,
        )
        step = training_step(model, optimizer, case, layout)
        name = f"natgrad KFAC {style}" + (f" {basis}" if basis != "exact" else "")
        return _curved(name, step, kfac, optimizer)

    return maker


def _spngd(case: Case, layout: str) -> Contender:
    model = case.model(layout)
    optimizer = natgrad.SPNGD(model, lr=LR, refresh=cycle(), loss=case.loss)  # pyright: ignore[reportArgumentType]
    step = training_step(model, optimizer, case, layout)
    return _curved("natgrad SPNGD", step, optimizer, optimizer)


def _polar(case: Case, layout: str) -> Contender:
    model = case.model(layout)
    optimizer = natgrad.Polar(model, lr=LR, refresh=cycle(), loss=case.loss)  # pyright: ignore[reportArgumentType]
    step = training_step(model, optimizer, case, layout)
    return _curved("natgrad Polar", step, optimizer, optimizer)


def _spngd_adaptive(case: Case, layout: str) -> Contender:
    model = case.model(layout)
    optimizer = natgrad.SPNGD(model, lr=LR, loss=case.loss)  # pyright: ignore[reportArgumentType]
    step = training_step(model, optimizer, case, layout)
    contender = _curved("natgrad SPNGD", step, optimizer, optimizer)
    contender.name = "natgrad SPNGD adaptive"
    contender.kinds = (PLAIN,) * ADAPTIVE_STEPS
    contender.policies = {ADAPTIVE: {PLAIN: 1}}
    contender.mean = True
    contender.prepare = lambda kind: None  # it has no cycle to be in step with
    contender.facts = lambda: {
        "refreshed": optimizer.refreshes()["reduction_rate"],
        "of_steps": optimizer.engine.step,
    }
    return contender


def _curved(
    name: str, step: Callable[[], None], curved: Any, optimizer: Optimizer
) -> Contender:
    def prepare(kind: str) -> None:
        next_kind = CYCLE[curved.engine.step % len(CYCLE)]
        if next_kind != kind:
            raise RuntimeError(f"{name} is about to make a {next_kind}, not a {kind}")

    return Contender(
        name=name,
        step=step,
        kinds=CYCLE,
        policies=REFRESHING,
        prepare=prepare,
        state=lambda: [
            state_of(optimizer),
            [
                [s.average, s.inverse, s.history]
                for s in curved.engine.statistics.states.values()
            ],
        ],
        target=curved,
    )


# -- others' --------------------------------------------------------------------------


def _shampoo(case: Case, layout: str) -> Contender:
    from pytorch_optimizer import Shampoo

    model = case.model(layout)
    optimizer: Any = Shampoo(model.parameters(), lr=LR, momentum=0.9)

    def prepare(kind: str) -> None:
        optimizer.preconditioning_compute_steps = 1 if kind == FULL else 10**9

    return _gradient_peer("Shampoo", model, optimizer, case, layout, prepare, 100)


def _soap(case: Case, layout: str) -> Contender:
    from pytorch_optimizer import SOAP

    model = case.model(layout)
    optimizer: Any = SOAP(model.parameters(), lr=LR)

    def prepare(kind: str) -> None:
        for state in optimizer.state.values():
            state["precondition_frequency"] = 1 if kind == FULL else 10**9

    return _gradient_peer("SOAP", model, optimizer, case, layout, prepare, 10)


def _gradient_peer(
    name: str,
    model: nn.Module,
    optimizer: Optimizer,
    case: Case,
    layout: str,
    prepare: Callable[[str], None],
    interval: int,
) -> Contender:
    """Statistics of the gradient at every step, roots or bases every ``interval``."""
    return Contender(
        name=f"{name} (pytorch_optimizer)",
        step=training_step(model, optimizer, case, layout),
        kinds=(FULL, PLAIN),
        policies={
            EVERY_STEP: {FULL: 1},
            f"1/{interval}": {FULL: 1, PLAIN: interval - 1},
        },
        prepare=prepare,
        max_rounds=PEER_ROUNDS,
        state=lambda: state_of(optimizer),
    )


def _kfac_pytorch(case: Case, layout: str) -> Contender:
    from kfac.preconditioner import (  # pyright: ignore[reportMissingImports]
        KFACPreconditioner,
    )

    model = case.model(layout)
    optimizer = _sgd(model)
    now = [FULL]
    peer = KFACPreconditioner(
        model,
        factor_update_steps=lambda step: 10**9 if now[0] == PLAIN else 1,
        inv_update_steps=lambda step: 1 if now[0] == FULL else 10**9,
        lr=LR,
    )
    batches = itertools.cycle(case.batches(layout))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        peer.step()
        optimizer.step()

    return Contender(
        name="kfac-pytorch",
        step=step,
        kinds=CYCLE,
        policies=REFRESHING,
        prepare=lambda kind: now.__setitem__(0, kind),
        max_rounds=SLOW_PEER_ROUNDS,
        state=lambda: [
            state_of(optimizer),
            [vars(layer) for _, layer in peer._layers.values()],
        ],
    )


@contextmanager
def _without_nvtx() -> Iterator[None]:
    """asdl marks ranges for CUDA's profiler, which a CPU build of torch refuses."""
    with mock.patch("torch.cuda.nvtx.range", return_value=nullcontext()):
        yield


def _asdl(case: Case, layout: str) -> Contender:
    import asdl  # pyright: ignore[reportMissingImports]

    model = case.model(layout)
    optimizer = _sgd(model)
    settings = asdl.PreconditioningConfig(
        data_size=case.batch, damping=1e-3, ema_decay=0.05
    )
    maker = asdl.KfacGradientMaker(model, settings, fisher_type=asdl.FISHER_EMP)
    now = [FULL]
    maker.do_update_curvature = lambda step=None: now[0] != PLAIN
    maker.do_update_preconditioner = lambda step=None: now[0] == FULL
    batches = itertools.cycle(case.batches(layout))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        outputs = maker.setup_model_call(model, x)
        maker.setup_loss_call(nn.functional.cross_entropy, outputs, y)
        with _without_nvtx():
            maker.forward_and_backward()
        optimizer.step()

    return Contender(
        name="asdl",
        step=step,
        kinds=CYCLE,
        policies=REFRESHING,
        prepare=lambda kind: now.__setitem__(0, kind),
        max_rounds=SLOW_PEER_ROUNDS,
    )


MAKERS: dict[str, Maker] = {
    BASELINE: _plain(BASELINE, _sgd),
    "AdamW": _plain("AdamW", _adamw),
    "Muon": _plain("Muon", _muon, PEER_ROUNDS),
    "Shampoo": _shampoo,
    "SOAP": _soap,
    "kfac-pytorch": _kfac_pytorch,
    "asdl": _asdl,
    "KFAC eigen": _kfac("eigen"),
    "KFAC eigen tracked": _kfac("eigen", "tracked"),
    "KFAC factored": _kfac("factored"),
    "Polar": _polar,
    "SPNGD": _spngd,
    "SPNGD adaptive": _spngd_adaptive,
}
SLOW = (BASELINE, "AdamW", "KFAC factored")
"""Who takes part where a step takes seconds."""
WITH_MORE_THREADS = (
    *("Muon", "SOAP"),
    *("KFAC eigen", "KFAC factored", "Polar", "SPNGD", "SPNGD adaptive"),
)
"""Who is measured with a second number of threads too."""
IMAGES_ONLY = ("asdl",)


def make_all(
    case: Case, layout: str, only: Iterable[str] = (), say: Any = print
) -> list[Contender]:
    """The contenders of a case, the baseline first; absent packages are named."""
    wanted = set(only) or set(SLOW if case.slow else MAKERS)
    made: list[Contender] = []
    for name, make in MAKERS.items():
        if name not in {BASELINE, *wanted} or (case.tokens and name in IMAGES_ONLY):
            continue
        try:
            made.append(make(case, layout))
        except ImportError as error:
            say(f"  {name} is left out: {error}")
    return made
