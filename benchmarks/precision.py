"""What rounding to half precision does to statistics, updates and a short training.

    python -m benchmarks.precision

A small convolutional network on scikit-learn's digits. At several steps of a training
in float32, the same batch is seen again with activations and gradients rounded before
they are multiplied (`Options.factor_precision`): relative errors, in the Frobenius
norm, of A and G and of K-FAC's whole update. Beside them how far the estimates of the
next batch are away. Then whole short trainings. Writes precision.md.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import RESULTS, describe, machine, markdown_table, say
from natgrad import KFAC, Every

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
BATCH, TRAINED, LOOKS = 128, 1536, (0, 30, 119)
LOSS_SCALE = 1e-4
"""Of one of the looks: gradients as small as those of large batches."""

Batch = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def data() -> tuple[Batch, Batch]:
    """To train, and to test."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(pixels).float().view(-1, 1, 8, 8)[order] / 16
    y = torch.from_numpy(labels).long()[order]
    return (x[:TRAINED], y[:TRAINED]), (x[TRAINED:], y[TRAINED:])


def batches(train: Batch, steps: int, seed: int) -> Iterator[Batch]:
    """Epochs in random order."""
    generator = torch.Generator().manual_seed(seed)
    each = TRAINED // BATCH
    orders = [
        torch.randperm(TRAINED, generator=generator) for _ in range(-(-steps // each))
    ]
    for chosen in list(torch.cat(orders).split(BATCH))[:steps]:
        yield train[0][chosen], train[1][chosen]


def kfac_of(
    model: nn.Module, precision: torch.dtype | None, **changes: object
) -> tuple[KFAC, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = replace(KFAC.defaults, factor_precision=precision, **changes)
    return KFAC(model, optimizer, options=options), optimizer


def seen(
    model: nn.Module, batch: Batch, precision: torch.dtype | None, scale: float = 1.0
) -> tuple[dict[str, Tensor], Tensor]:
    """Statistics of one batch, and the update by them, at the model's weights."""
    model = deepcopy(model)
    kfac, optimizer = kfac_of(model, precision, refresh=Every())
    (scale * F.cross_entropy(model(batch[0]), batch[1])).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    found = {name: kfac.statistic(name) for name in kfac.engine.statistics.states}
    pairs = zip(model.parameters(), before, strict=True)
    kfac.close()
    return found, torch.cat([(p.detach() - old).flatten() for p, old in pairs])


def away(found: Tensor, wanted: Tensor) -> float:
    """The relative error."""
    return float((found - wanted).norm() / wanted.norm())


def errors(
    found: tuple[dict[str, Tensor], Tensor], wanted: tuple[dict[str, Tensor], Tensor]
) -> list[str]:
    """The largest of any layer's A, of any G, and that of the update."""
    each = {name: away(found[0][name], x) for name, x in wanted[0].items()}
    largest = [max(e for n, e in each.items() if n.endswith(k)) for k in ("/A", "/G")]
    return [f"{x:.1e}" for x in (*largest, away(found[1], wanted[1]))]


def looks(train: Batch) -> list[list[str]]:
    """Rows: step, what is compared, errors."""
    rows: list[list[str]] = []

    def look(step: int, model: nn.Module, batch: Batch, other: Batch) -> None:
        for scale in (1.0, LOSS_SCALE) if step == LOOKS[-1] else (1.0,):
            wanted = seen(model, batch, None, scale)
            where = str(step) if scale == 1.0 else f"{step}, loss x {scale:g}"
            for name, precision in PRECISIONS.items():
                found = seen(model, batch, precision, scale)
                rows.append([where, name, *errors(found, wanted)])
            if scale == 1.0:
                found = seen(model, other, None)
                rows.append([where, "float32, next batch", *errors(found, wanted)])

    training(train, None, steps=LOOKS[-1] + 1, look=look)
    return rows


def training(
    train: Batch,
    precision: torch.dtype | None,
    *,
    steps: int,
    seed: int = 0,
    look: Callable[[int, nn.Module, Batch, Batch], None] | None = None,
) -> nn.Module:
    """A model trained with K-FAC's defaults."""
    torch.manual_seed(seed)
    model = network()
    kfac, optimizer = kfac_of(model, precision)
    given = list(batches(train, steps + 1, seed))
    for step, (x, y) in enumerate(given[:-1]):
        if look is not None and step in LOOKS:
            look(step, model, (x, y), given[step + 1])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    kfac.close()
    return model


def ends(train: Batch, test: Batch, steps: int, seeds: int) -> list[list[str]]:
    """Rows: precision, loss on what was trained on, accuracy on the rest."""
    rows: list[list[str]] = []
    for name, precision in {"float32": None, **PRECISIONS}.items():
        losses: list[float] = []
        right: list[float] = []
        for seed in range(seeds):
            model = training(train, precision, steps=steps, seed=seed)
            with torch.no_grad():
                losses.append(float(F.cross_entropy(model(train[0]), train[1])))
                correct = (model(test[0]).argmax(1) == test[1]).float()
                right.append(100 * float(correct.mean()))
        rows.append([name, _spread(losses, ".4f"), _spread(right, ".2f")])
        say("  ".join(rows[-1]))
    return rows


def _spread(values: list[float], form: str) -> str:
    middle = f"{statistics.mean(values):{form}}"
    return f"{middle} ({min(values):{form}} to {max(values):{form}})"


def main(arguments: list[str] | None = None) -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    train, test = data()
    text = [
        "# Statistics in half precision",
        describe(machine()),
        f"Digits, {BATCH} examples a batch, a network of two convolutions and two "
        "linear layers. Relative errors against float32: the largest of any layer's A "
        "and G, and of K-FAC's update at its default damping. `next batch` is what "
        "sampling does. Made by `python -m benchmarks.precision`.",
        markdown_table(("step", "products", "A", "G", "update"), looks(train)),
        f"Trainings of {options.steps} steps, {options.seeds} seeds, mean and range.",
        markdown_table(
            ("products", "training loss", "test accuracy, %"),
            ends(train, test, options.steps, options.seeds),
        ),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "precision.md").write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
