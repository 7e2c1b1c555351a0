"""Trainers do what a loop by hand does; on two ranks, what it does on one."""

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integrations.test_integrations import (
    STEPS,
    batches,
    close,
    counting,
    made,
    plain,
)
from tests.support.toys import batch, mlp, parameters, same, train
from tests.support.world import run_world
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

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


# positions are looked up once for all rows of a batch, however it is cut
TEXT: dict[str, Any] = {"loss": "tokens", "skip": ("transformer.wpe",)}


def trained(
    folder: Path, steps: int, resume: bool = False, micro: int = 1
) -> list[Tensor]:
    transformers = pytest.importorskip("transformers")
    model = gpt2()
    optimizer, _ = made(model, **TEXT)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8 // micro,
        gradient_accumulation_steps=micro,
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
    optimizer, kfac = made(model, **TEXT)
    tokens = Rows().tokens
    terms = torch.tensor(tokens.numel())  # what the Trainer divides the sum by
    for _ in range(4):
        optimizer.zero_grad()
        out = model(input_ids=tokens, labels=tokens, num_items_in_batch=terms)
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert close(trained(tmp_path / "whole", 4), parameters(model))
    # in what order rows are drawn does not matter: all are in a step
    assert close(trained(tmp_path / "micro", 4, micro=2), parameters(model))
    trained(tmp_path / "parts", 2)
    assert close(trained(tmp_path / "parts", 4, resume=True), parameters(model))
    layers = {name for name, b in kfac.engine.block.items() if b.kind is not None}
    assert {"transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_proj"} <= layers


# -- two ranks ----------------------------------------------------------------------

Found = tuple[str, list[Tensor]]
"""How the model was wrapped, and its parameters."""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def as_launched(rank: int, port: int) -> None:
    """No process group, and the environment that torchrun makes: trainers do the rest.

    Both ranks see the same batches, so that their mean is what one would see.
    """
    dist.barrier()  # a group that is gone breaks the other rank's connecting to it
    dist.destroy_process_group()
    names = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": 2}
    names |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def accelerated(rank: int, port: int) -> Found:
    import accelerate

    as_launched(rank, port)
    model = mlp()
    optimizer, _ = made(model)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    run, stepper = accelerator.prepare(model, optimizer)
    for step in range(6):
        x, y = batch(step)
        with accelerator.accumulate(run):
            accelerator.backward(F.cross_entropy(run(x), y))
            stepper.step()
            stepper.zero_grad()
    return type(run).__name__, parameters(model)


def fitted(rank: int, port: int) -> Found:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    as_launched(rank, port)
    wrapped: list[str] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            model: Any = self.trainer.model
            wrapped.append(type(model).__name__)
            return made(model)[0]

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches(6), batch_size=16))
    assert trainer.world_size == 2
    return wrapped[0], parameters(module.net)


@pytest.mark.processes
@pytest.mark.parametrize("trainer", [accelerated, fitted])
def test_a_trainer_that_accumulates_on_two_ranks(trainer: Any, port: int) -> None:
    pytest.importorskip({accelerated: "accelerate", fitted: "lightning"}[trainer])
    expected = plain(3, micro=2)
    for wrapped, found in run_world(2, trainer, port, timeout=120):
        assert wrapped == "DistributedDataParallel"
        assert close(found, expected)


def compiled() -> Iterator[tuple[nn.Module, nn.Module, list[Any]]]:
    """The net, how it is called, and the graphs that are made of it."""
    for order in ("compile(ddp)", "ddp(compile)", "ddp(compile), fullgraph"):
        net, graphs = mlp(), list[Any]()
        backend, full = counting(graphs), order.endswith("fullgraph")
        torch.compiler.reset()
        if order == "compile(ddp)":
            run: Any = torch.compile(DistributedDataParallel(net), backend=backend)
        else:
            inner: Any = torch.compile(net, backend=backend, fullgraph=full)
            run = DistributedDataParallel(inner)
        yield net, run, graphs


def all_compiled(_: int) -> list[tuple[list[Tensor], int]]:
    found: list[tuple[list[Tensor], int]] = []
    for net, run, graphs in compiled():
        optimizer, kfac = made(run)
        with kfac:
            train(run, optimizer, range(STEPS))
        found.append((parameters(net), len(graphs)))
    return found


@pytest.mark.processes
def test_compiled_inside_and_outside_of_ddp() -> None:
    expected = plain()
    for results in run_world(2, all_compiled, timeout=120):
        for found, graphs in results:
            assert close(found, expected)
            assert graphs == 1  # steps with nothing due run compiled
