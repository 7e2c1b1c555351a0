"""Under torch.compile, DDP and trainers, KFAC does what it does in a plain loop."""

import copy
import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toys import backward, batch, mlp, parameters, same, train
from tests.world import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import natgrad
from natgrad import hooks

REFRESH = natgrad.Every(statistics=2, inverses=4)
STEPS = 6


def made(model: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer, natgrad.KFAC(model, optimizer, refresh=REFRESH, **options)


def plain(steps: int = STEPS, micro: int = 1, **options: Any) -> list[Tensor]:
    """Parameters after a loop by hand, from which every trainer must not differ."""
    model = mlp()
    optimizer, kfac = made(model, **options)
    with kfac:
        for step in range(steps):
            optimizer.zero_grad()
            for i in range(micro):
                x, y = batch(step * micro + i)
                (F.cross_entropy(model(x), y) / micro).backward()
            optimizer.step()
    return parameters(model)


def close(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)


def batches(count: int) -> TensorDataset:
    """The toys' batches one after the other, for a loader that does not shuffle."""
    pairs = [batch(i) for i in range(count)]
    return TensorDataset(*(torch.cat(part) for part in zip(*pairs, strict=True)))


# -- torch.compile ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nobody_else_watches() -> None:
    """Optimizers that other tests never closed keep compiled code from being used."""
    for other in [*hooks._STANCE.watched]:
        other.watch(False)


@pytest.fixture
def graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that the backend `counting` was given."""
    seen: list[torch.fx.GraphModule] = []
    gc.collect()  # models of other tests that are still watched
    torch.compiler.reset()
    yield seen
    torch.compiler.reset()


def counting(seen: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        seen.append(graph)
        return graph.forward

    return backend


@pytest.mark.parametrize("order", ["before", "around", "after a call", "in place"])
def test_a_compiled_model(order: str, graphs: list[torch.fx.GraphModule]) -> None:
    model = mlp()
    run: nn.Module = model
    if order != "before":
        run = torch.compile(model, backend=counting(graphs))  # pyright: ignore
    if order == "after a call":
        backward(run, 0)
    if order == "in place":
        model.compile(backend=counting(graphs))
        run = model
    source = copy.deepcopy(mlp().state_dict())
    model.load_state_dict(source)
    optimizer, kfac = made(run if order == "around" else model)
    if order == "before":
        run = torch.compile(model, backend=counting(graphs))  # pyright: ignore
    with kfac:
        train(run, optimizer, range(STEPS))
        assert list(kfac.engine.block) == ["0", "1.weight", "1.bias", "3"]
    assert close(parameters(model), plain())
    # one graph, of the whole model: steps with nothing due, which run compiled
    assert len(graphs) == 1


def test_a_model_that_is_watched_runs_as_written_only_while_it_is(
    graphs: list[torch.fx.GraphModule],
) -> None:
    doubled = torch.compile(lambda x: x * 2, backend=counting(graphs))
    _, kfac = made(mlp())
    doubled(torch.ones(2))
    assert not graphs
    kfac.close()
    doubled(torch.ones(2))
    assert len(graphs) == 1


def test_a_stance_that_a_user_has_set_comes_back(
    graphs: list[torch.fx.GraphModule],
) -> None:
    doubled = torch.compile(lambda x: x * 2, backend=counting(graphs))
    with torch.compiler.set_stance("force_eager"):
        _, kfac = made(mlp())
        kfac.close()
        doubled(torch.ones(2))
    assert not graphs


def test_a_compiled_optimizer_step(graphs: list[torch.fx.GraphModule]) -> None:
    model = mlp()
    optimizer, kfac = made(model)
    step = torch.compile(optimizer.step, backend=counting(graphs))
    with kfac:
        for i in range(STEPS):
            backward(model, i)
            step()
    assert close(parameters(model), plain())
    assert graphs


# -- several ranks ------------------------------------------------------------------


def wrapped(_: int, late: bool, micro: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Both ranks see the same batch, so that their mean is what one would see."""
    net = mlp()
    optimizer, kfac = made(net) if late else (None, None)
    model = DistributedDataParallel(net)
    if not late:
        optimizer, kfac = made(model)
    assert optimizer is not None
    assert kfac is not None
    for step in range(3):
        optimizer.zero_grad()
        for i in range(micro):
            with model.no_sync() if i < micro - 1 else nullcontext():
                x, y = batch(step * micro + i)
                (F.cross_entropy(model(x), y) / micro).backward()
        optimizer.step()
    moved = kfac.traffic()["total"]
    kfac.close()
    return parameters(net), moved


@pytest.mark.processes
@pytest.mark.parametrize(("late", "micro"), [(False, 2), (True, 1), (True, 2)])
def test_a_model_wrapped_before_or_after(late: bool, micro: int) -> None:
    expected = plain(3, micro)
    for found, moved in run_world(2, wrapped, late, micro):
        assert close(found, expected)
        assert moved["reduce_statistics"]["sent"] > 0
        # DDP has moved the gradients already
        assert moved.get("reduce_gradients", {}).get("sent", 0) == 0


def sharded(_: int) -> None:
    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(TypeError, match=r"0\.weight is a DTensor.*FSDP"):
        natgrad.KFAC(model, optimizer)


@pytest.mark.processes
def test_a_sharded_model_is_refused() -> None:
    run_world(1, sharded)


# -- Lightning ----------------------------------------------------------------------


def fit(folder: Path, epochs: int, resume: str | None = None) -> list[Tensor]:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return made(self.trainer.model)[0]

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loaders without workers
        trainer.fit(module, DataLoader(batches(6), batch_size=16), ckpt_path=resume)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return parameters(module)


def test_lightning_does_what_a_loop_by_hand_does(tmp_path: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = fit(tmp_path, 1)
    assert close(found, plain(3, micro=2))
    whole, resumed = fit(tmp_path, 2), fit(tmp_path, 2, str(tmp_path / "1.ckpt"))
    assert same(resumed, whole)


# -- Hugging Face -------------------------------------------------------------------


def test_accelerate_does_what_a_loop_by_hand_does() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = mlp()
    optimizer, _ = made(model)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(batches(6), batch_size=16)
    run, stepper, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(run):
            accelerator.backward(F.cross_entropy(run(x), y))
            stepper.step()
            stepper.zero_grad()
    assert close(parameters(model), plain(3, micro=2))


class Rows(Dataset[dict[str, Tensor]]):
    """Eight rows of tokens, all of which are one batch: no order matters."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(7, (8, 5), generator=source)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id")
    config = transformers.GPT2Config(
        vocab_size=7,
        n_positions=5,
        n_embd=8,
        n_layer=1,
        n_head=2,
        tie_word_embeddings=False,
        **dict.fromkeys(names, 0),
    )
    return transformers.GPT2LMHeadModel(config).double()


def trained(folder: Path, steps: int, resume: bool = False) -> list[Tensor]:
    transformers = pytest.importorskip("transformers")
    model = gpt2()
    optimizer, _ = made(model, loss="tokens")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Rows(), optimizers=(optimizer, None)
    )
    trainer.train(resume_from_checkpoint=resume)
    return parameters(model)


def test_trainer_does_what_a_loop_by_hand_does(tmp_path: Path) -> None:
    model = gpt2()
    optimizer, kfac = made(model, loss="tokens")
    tokens = Rows().tokens
    terms = torch.tensor(tokens.numel())  # what the Trainer divides the sum by
    for _ in range(4):
        optimizer.zero_grad()
        out = model(input_ids=tokens, labels=tokens, num_items_in_batch=terms)
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert close(trained(tmp_path / "whole", 4), parameters(model))
    trained(tmp_path / "parts", 2)
    assert close(trained(tmp_path / "parts", 4, resume=True), parameters(model))
    layers = {name for name, b in kfac.engine.block.items() if b.kind is not None}
    assert {"transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_proj"} <= layers
