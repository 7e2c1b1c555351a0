"""Train cases with the natgrad of one tree, and say what came out as digests.

Runs inside a tree that need not have this file, so it imports torch and natgrad only:
``python driver.py TREE OUT`` reads cases as JSON from standard input and writes their
outcomes to the file OUT. ``cases.py`` says what a case is.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any


class Clock:
    """Seconds that pass by what is computed, not by how long that takes.

    So that `Budget`, which decides from seconds, decides the same in both trees: a
    forward and backward take one second, a decomposition what its size says.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def charging(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def charged(x: Any, *args: Any, **kwargs: Any) -> Any:
            self.now += 1e-3 * x.shape[-1] * x[..., 0, 0].numel()
            return function(x, *args, **kwargs)

        return charged


CLOCK = Clock()
if __name__ == "__main__":
    time.perf_counter = CLOCK  # before natgrad binds it
    import torch._dynamo  # an optimizer's first step does, on each rank

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import natgrad  # noqa: E402

STEPS = 20
BATCH = 6  # of each rank
CLASSES, VOCABULARY = 3, 7
WAIT = timedelta(seconds=60)


# -- networks and data -----------------------------------------------------------------


class Scale(nn.Module):
    """A parameter of a layer that has no block."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def images() -> nn.Module:
    """Convolutions, one grouped, with batch norms, an in-place ReLU, linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, 5),
        Scale(5),
        nn.LayerNorm(5),
        nn.Linear(5, CLASSES),
    )


def vectors() -> nn.Module:
    """Linear layers, three of one shape, and parameters without a block."""
    middle = [part for _ in range(3) for part in (nn.Linear(6, 6), nn.Tanh())]
    first = (nn.Linear(5, 6), nn.Tanh())
    return nn.Sequential(*first, *middle, Scale(1, 6), nn.Linear(6, CLASSES))


class Text(nn.Module):
    """An embedding, layer norms and linear layers over positions; a class for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.norm(self.embedding(x)))))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "images": images,
    "vectors": vectors,
    "tokens": Text,
}


def batch(case: dict[str, Any], step: int, rank: int) -> tuple[Tensor, Tensor]:
    """What this rank sees in a step; NaN in one input of the step to be skipped."""
    source = torch.Generator().manual_seed(1000 * rank + step)
    if case["network"] == "tokens":
        x = torch.randint(VOCABULARY, (BATCH, 4), generator=source)
        return x, x.roll(1, 1)
    shape = (1, 8, 8) if case["network"] == "images" else (5,)
    x = torch.randn(BATCH, *shape, generator=source).to(getattr(torch, case["dtype"]))
    y = x.flatten(1)[:, :CLASSES].argmax(1)
    if step == case["poisoned"] and rank == 0:
        x[0] = float("nan")
    return x, y


# -- spelling a case for the tree at hand ----------------------------------------------

HALVED = "Halved"
NEW = hasattr(natgrad, "Options")


def made(value: Any) -> Any:
    """``["Name", {fields}]`` as natgrad's object of that name; all else as it is."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[1], dict):
        name, fields = value[0], {k: made(v) for k, v in value[1].items()}
        if name == HALVED:
            return halved(**fields)
        return getattr(natgrad, name)(**fields)
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return tuple(value) if isinstance(value, list) else value


def halved(start: float, every: int) -> Callable[[int], float]:
    """A schedule of the damping."""
    return lambda step: start / 2 ** (step // every)


SCALES = {
    "Kronecker": "kronecker",
    "EKFAC": "corrected",
    "EigenAdam": "adaptive",
    "Orthogonal": "orthogonal",
}
FLAT_NAMES = {"sides": "statistics", "style": "damping_style"}


def flat(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of trees without `natgrad.Options`, where parts were flat."""
    keywords: dict[str, Any] = {}
    for name, value in options.items():
        if name in FLAT_PARTS:
            keywords |= FLAT_PARTS[name](*value)
        else:
            keywords["decay" if name == "factor_decay" else name] = made(value)
    if kind == "polar":  # which had no choice of these
        keywords = {k: v for k, v in keywords.items() if k != "rest"}
    return keywords


def _flat_rule(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    renamed = {FLAT_NAMES.get(field, field): x for field, x in fields.items()}
    return {"scale": SCALES[name], **renamed}


def _flat_length(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    if name == "KLClip":
        rate = {"lr": fields["lr"]} if "lr" in fields else {}
        return {"trust": "kl", "kl_clip": fields.get("kappa", 1e-3), **rate}
    return {"trust": {"Free": "none", "LayerTrust": "layer"}[name]}


def _flat_average(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    average = {"AverageUpdates": "update", "AverageGradients": "gradient"}[name]
    return {"average": average, **fields}


def _flat_fallback(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    if name == "Plain":
        return {"rest": "plain"}
    rate = {"rest_rate": fields["rate"]} if "rate" in fields else {}
    beta2 = {"beta2": fields["beta2"]} if "beta2" in fields else {}
    return {"rest": "adaptive", **rate, **beta2}


def _flat_decay(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    # Coupled and Decoupled followed from the length
    return {"rescale_weights": True} if name == "Rescaled" else {}


FLAT_PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "rule": _flat_rule,
    "length": _flat_length,
    "average": _flat_average,
    "fallback": _flat_fallback,
    "decay": _flat_decay,
}


def keywords_for(kind: str, cls: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options as this tree's constructors take them."""
    if not NEW:
        return flat(kind, options)
    if not options:
        return {}
    fields = {name: made(value) for name, value in options.items()}
    return {"options": dataclasses.replace(cls.defaults, **fields)}


def build(case: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    """The module to call, the torch optimizer (or None), and natgrad's object."""
    torch.manual_seed(0)
    model: nn.Module = NETWORKS[case["network"]]()
    model.to(getattr(torch, case["dtype"]))
    for name in case["frozen"]:
        model.get_submodule(name).requires_grad_(False)
    if case["ddp"] and dist.is_initialized():
        model = DistributedDataParallel(model)
    kind, host = case["optimizer"], case["host"]
    cls = {"kfac": natgrad.KFAC, "spngd": natgrad.SPNGD, "polar": natgrad.Polar}[kind]
    keywords = keywords_for(kind, cls, case["options"])
    if case["scaler"]:
        keywords["grad_scaler"] = case["scaler"]
    if case["groups"]:
        keywords["groups" if NEW else "param_groups"] = groups(model)
    if kind != "kfac":
        whole = cls(model, **keywords)
        return model, whole, whole
    optimizer: Any = None
    if host == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    elif host == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, cls(model, optimizer, **keywords)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: the last layer has settings of its own."""
    named = list(model.named_parameters())
    last = {"params": named[-2:], "lr": 0.01, "momentum": 0.5, "weight_decay": 0.0}
    return [{"params": named[:-2]}, last]


# -- training --------------------------------------------------------------------------


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a case came to on this rank."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if case["scaler"] else None
    case = {**case, "scaler": scaler}
    CLOCK.now = 0.0
    model, optimizer, natural = build(case)
    if case["watch"]:
        natural.watch(every=case["watch"])
    torch.manual_seed(7 + rank)  # what sampled labels and subsamples are drawn from
    for step in range(STEPS):
        if step and step == case["resumed"]:
            natural.gather()
            parts = plain(model), optimizer or natural
            saved = copy.deepcopy([part.state_dict() for part in parts])
            natural.close()
            model, optimizer, natural = build(case)
            for part, state in zip(
                (plain(model), optimizer or natural), saved, strict=True
            ):
                part.load_state_dict(state)
        train(case, model, optimizer, natural, batch(case, step, rank))
    natural.gather()
    state = tensors((optimizer or natural).state_dict())
    outcome = {
        "weights": digest(plain(model).state_dict().values()),
        "state": sorted(digest([x]) for x in state),
        "refreshes": refreshes(natural),
    }
    natural.close()
    return outcome


def plain(model: Any) -> nn.Module:
    """Without DistributedDataParallel."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def train(
    case: dict[str, Any],
    model: nn.Module,
    optimizer: Any,
    natural: Any,
    data: tuple[Tensor, Tensor],
) -> None:
    """One step."""
    CLOCK.now += 1.0
    model.zero_grad()
    micro, scaler = case["micro"], case["scaler"]
    chunks = zip(*(part.chunk(micro) for part in data), strict=True)
    for x, y in chunks:
        outputs = model(x)
        if case["options"].get("fisher") == "sampled":
            natural.sampled_backward(outputs)
        how = "sum" if case["options"].get("loss") == "sum" else "mean"
        loss = nn.functional.cross_entropy(
            outputs.flatten(0, -2), y.flatten(), reduction=how
        )
        if case["options"].get("accumulation") != "sum":
            loss = loss / micro
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.step(optimizer or natural)
        scaler.update()
        return
    (optimizer or natural).step()
    if optimizer is None and case["optimizer"] == "kfac":
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.05)


def tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts and sequences."""
    if isinstance(tree, Tensor):
        yield tree
    for leaf in tree.values() if isinstance(tree, dict) else ():
        yield from tensors(leaf)
    for leaf in tree if isinstance(tree, list | tuple) else ():
        yield from tensors(leaf)


def digest(values: Any) -> str:
    """SHA-256 of the bytes of tensors, in their order; of their shapes nothing."""
    found = hashlib.sha256()
    for x in values:
        flat = x.detach().cpu().contiguous().flatten()
        found.update(str(x.dtype).encode())
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def refreshes(natural: Any) -> dict[str, list[int]]:
    """By statistic: how often estimated, left out and inverted."""
    counted = natural.refreshes()["statistics"].items()
    kinds = ("refreshed", "skipped", "inverted")
    return {name: [counts[kind] for kind in kinds] for name, counts in counted}


# -- ranks -----------------------------------------------------------------------------


def attempt(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a case came to, or its error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(case, rank)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return {"error": f"{type(error).__name__}: {error}", "traceback": text}


def rank_main(pipe: Any, rank: int, world: int, store: str, cases: Any) -> None:
    """Every case of a world, one after the other, in one process group."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=WAIT,
        )
    outcomes: dict[str, Any] = {}
    for name, case in cases.items():
        if world not in case["worlds"]:
            continue
        outcomes[name] = attempt(case, rank)
        if world > 1:
            dist.barrier()
    pipe.send(outcomes)
    pipe.close()
    if world > 1:
        dist.destroy_process_group()


def run_world(world: int, cases: Any) -> list[dict[str, Any]]:
    """The outcomes of every rank."""
    context = multiprocessing.get_context("fork")  # what is imported once serves all
    with tempfile.TemporaryDirectory() as folder:
        ends: list[Any] = []
        for rank in range(world):
            mine, theirs = context.Pipe(duplex=False)
            args = (theirs, rank, world, f"{folder}/store", cases)
            context.Process(target=rank_main, args=args, daemon=True).start()
            theirs.close()
            ends.append(mine)
        return [end.recv() for end in ends]


def main(tree: str, out: str) -> None:
    """Every case on the numbers of ranks that it asks for."""
    home = Path(natgrad.__file__).resolve()
    if not home.is_relative_to(Path(tree).resolve()):
        raise SystemExit(f"natgrad was imported from {home}. Must be inside {tree}.")
    for name in ("eigh", "cholesky_ex", "qr"):
        setattr(torch.linalg, name, CLOCK.charging(getattr(torch.linalg, name)))
    cases = json.load(sys.stdin)
    worlds = sorted({world for case in cases.values() for world in case["worlds"]})
    found = {str(world): run_world(world, cases) for world in worlds}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
