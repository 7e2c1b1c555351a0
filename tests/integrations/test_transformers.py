"""Small models of transformers, as they come: each optimizer trains each of them."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from natgrad import KFAC, SPNGD, Every, Polar


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Imported when a test runs, not when tests are collected: it takes seconds."""
    pytest.importorskip("transformers")


WORDS, LENGTH, BATCH = 20, 5, 2
SIZES = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "intermediate_size": 12}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PAIR = {
    "vocab_size": WORDS,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "dropout": 0.0,
    "decoder_start_token_id": 2,
    **SPECIAL,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what it is called with, and layers of which the report must tell.

    ``terms`` is what its loss is a mean over, which must be said if the model shifts
    its labels; ``layers`` are compared with brute force.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    terms: int
    layers: tuple[str, ...]
    plain: dict[str, str]
    loss: str = "tokens"
    is_shifted: bool = False


def words(length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (BATCH, length))


def text() -> dict[str, Tensor]:
    tokens = words()
    return {"input_ids": tokens, "labels": tokens}


def pairs() -> dict[str, Tensor]:
    return {"input_ids": words(12), "labels": words()}


def of(name: str, kind: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library: Any = importlib.import_module("transformers")
        config = getattr(library, f"{name}Config")(**options)
        return getattr(library, f"{name}{kind}")(config)

    return build


CASES = {
    "bart": Case(
        build=of("Bart", "ForConditionalGeneration", **PAIR),
        inputs=pairs,
        terms=BATCH * LENGTH,
        layers=("model.encoder.layers.0.fc1", "model.decoder.layers.0.fc1"),
        plain={
            "model.encoder.embed_positions.weight": "overrides Embedding.forward",
            "model.decoder.embed_positions.weight": "overrides Embedding.forward",
        },
    ),
    "whisper": Case(
        build=of(
            "Whisper",
            "ForConditionalGeneration",
            num_mel_bins=4,
            max_source_positions=12,
            max_target_positions=LENGTH,
            **PAIR,
        ),
        inputs=lambda: {
            "input_features": torch.randn(BATCH, 4, 24),
            "labels": words(),
        },
        terms=BATCH * LENGTH,
        layers=("model.encoder.conv1", "model.encoder.layers.0.fc1"),
        plain={"model.decoder.embed_positions.weight": "overrides Embedding.forward"},
    ),
    "t5": Case(
        build=of(
            "T5",
            "ForConditionalGeneration",
            vocab_size=WORDS,
            d_model=8,
            d_kv=4,
            d_ff=12,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        ),
        inputs=pairs,
        terms=BATCH * LENGTH,
        layers=("encoder.block.0.layer.0.SelfAttention.q",),
        plain={"encoder.final_layer_norm.weight": "T5LayerNorm is not a known layer"},
    ),
    "opt": Case(
        build=of(
            "OPT",
            "ForCausalLM",
            ffn_dim=12,
            word_embed_proj_dim=8,
            dropout=0.0,
            max_position_embeddings=LENGTH,
            num_attention_heads=2,
            **SIZES,
            **SPECIAL,
        ),
        inputs=text,
        terms=BATCH * (LENGTH - 1),
        is_shifted=True,
        layers=("model.decoder.layers.0.fc1",),
        plain={"model.decoder.embed_positions.weight": "overrides Embedding.forward"},
    ),
    "llama": Case(
        build=of("Llama", "ForCausalLM", **SIZES, **HEADS, **SPECIAL),
        inputs=text,
        terms=BATCH * (LENGTH - 1),
        is_shifted=True,
        layers=("model.layers.0.mlp.up_proj", "lm_head"),
        plain={"model.norm.weight": "LlamaRMSNorm is not a known layer"},
    ),
    "mixtral": Case(
        build=of(
            "Mixtral",
            "ForCausalLM",
            num_local_experts=2,
            num_key_value_heads=2,
            **SIZES,
            **HEADS,
            **SPECIAL,
        ),
        inputs=text,
        terms=BATCH * (LENGTH - 1),
        is_shifted=True,
        layers=("model.layers.0.self_attn.q_proj",),
        plain={
            "model.layers.0.mlp.experts.gate_up_proj": "MixtralExperts is not a known",
            "model.layers.0.mlp.gate.weight": "MixtralTopKRouter is not a known layer",
        },
    ),
    "bert": Case(
        build=of(
            "Bert",
            "ForSequenceClassification",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
            **SIZES,
            **HEADS,
        ),
        inputs=lambda: {"input_ids": words(), "labels": torch.tensor([0, 2])},
        terms=BATCH,
        layers=("bert.encoder.layer.0.output.dense", "classifier"),
        plain={},
        loss="mean",
    ),
    "vit": Case(
        build=of(
            "ViT",
            "ForImageClassification",
            image_size=8,
            patch_size=4,
            hidden_size=8,
            num_hidden_layers=1,
            num_labels=3,
            **HEADS,
        ),
        inputs=lambda: {
            "pixel_values": torch.randn(BATCH, 3, 8, 8),
            "labels": torch.tensor([0, 2]),
        },
        terms=BATCH,
        layers=("vit.embeddings.patch_embeddings.projection", "classifier"),
        plain={"vit.embeddings.cls_token": "ViTEmbeddings is not a known layer"},
        loss="mean",
    ),
}


def optimizers(model: nn.Module, loss: Any) -> Iterator[tuple[Any, Any]]:
    host = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with KFAC(model, host, loss=loss, refresh=Every()) as kfac:
        yield kfac, host
    for make in (SPNGD, Polar):
        with make(model, lr=1e-3, loss=loss) as optimizer:
            yield optimizer, optimizer


def output_moments(
    model: nn.Module, layers: tuple[str, ...], inputs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The sum of g g^T over all uses of a layer."""
    seen: dict[str, list[Any]] = {name: [] for name in layers}
    modules = {model.get_submodule(name): name for name in layers}

    def keep(module: nn.Module, _: Any, output: Any) -> None:
        seen[modules[module]].append(output)

    handles = [module.register_forward_hook(keep) for module in modules]
    loss = model(**inputs).loss
    for handle in handles:
        handle.remove()
    found: dict[str, Tensor] = {}
    for name, outputs in seen.items():
        grads = torch.autograd.grad(loss, outputs, retain_graph=True)
        channel = (
            1 if isinstance(model.get_submodule(name), nn.Conv1d | nn.Conv2d) else -1
        )
        rows = torch.cat([g.movedim(channel, -1).flatten(0, -2) for g in grads])
        found[name] = rows.T @ rows
    return found


def trained(
    case: Case, model: nn.Module, owner: Any, stepper: Any, inputs: dict[str, Tensor]
) -> Iterator[float]:
    """The losses of a few steps."""
    for _ in range(3):
        stepper.zero_grad()
        if case.is_shifted:
            owner.set_loss_terms(case.terms)
        loss = model(**inputs).loss
        loss.backward()
        stepper.step()
        yield loss.item()


@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_and_its_counts_are_those_of_its_loss(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    inputs = case.inputs()
    moments = output_moments(model, case.layers, inputs)
    for owner, stepper in optimizers(model, case.loss):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        steps = trained(case, model, owner, stepper, inputs)
        first = next(steps)
        if isinstance(owner, KFAC):
            for layer, moment in moments.items():
                g = owner.statistic(f"{layer}/G")[0]
                torch.testing.assert_close(g, case.terms * moment, rtol=1e-3, atol=1e-7)
        assert list(steps)[-1] < first
        for key, p in model.named_parameters():
            # the bias of a key has a gradient of rounding errors
            still = p.grad is None or p.grad.abs().max() < 1e-6
            assert p.isfinite().all(), key
            assert still or not torch.equal(p, before[key]), key
        report = owner.report().splitlines()
        for key, reason in case.plain.items():
            if isinstance(owner, Polar) and "Embedding.forward" in reason:
                reason = "its group follows adam"  # a vocabulary is one of its own
            row = next(x for x in report if x.startswith(f"{key} "))
            assert reason in row, row
        assert not any("used without statistics" in line for line in report)


def test_a_head_that_is_tied_to_an_embedding_that_is_not_known() -> None:
    model = CASES["bart"].build()
    one_group = [{"params": model.named_parameters()}]
    with Polar(model, one_group, lr=1e-3) as optimizer:
        report = optimizer.report().splitlines()
    row = next(line for line in report if line.startswith("model.shared.weight"))
    assert "linear" in row
    assert "leave out its use as model.shared" in row
