"""The models: names, shapes, sizes and initialisation."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad_lab import models

# Published counts: He et al. (2016) Table 6 (without the shortcuts' projections) in
# millions, and torchvision's documentation for the ImageNet networks.
CIFAR_MILLIONS = {
    "resnet20": 0.27,
    "resnet32": 0.46,
    "resnet44": 0.66,
    "resnet56": 0.85,
    "resnet110": 1.7,
}
IMAGENET_PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", models.names())
def test_every_model_builds_without_memory(name):
    model = models.build(name, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(("name", "millions"), CIFAR_MILLIONS.items())
def test_cifar_resnets_have_the_published_size(name, millions):
    assert count(models.build(name, device="meta")) / 1e6 == pytest.approx(
        millions, rel=0.02
    )


@pytest.mark.parametrize(("name", "parameters"), IMAGENET_PARAMETERS.items())
def test_imagenet_resnets_have_the_published_size(name, parameters):
    assert count(models.build(name, device="meta")) == parameters


@pytest.mark.parametrize("depth", [8, 20, 32, 44, 56, 110])
def test_depth_counts_convolutions_and_the_last_layer(depth):
    model = models.build(f"resnet{depth}", device="meta")
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


Shapes = dict[str, tuple[int, ...]]
# blocks a stage and convolutions a block, as torchvision.models.resnet has them
TORCHVISION = {
    "resnet18": ((2, 2, 2, 2), 2),
    "resnet34": ((3, 4, 6, 3), 2),
    "resnet50": ((3, 4, 6, 3), 3),
    "resnet101": ((3, 4, 23, 3), 3),
    "resnet152": ((3, 8, 36, 3), 3),
}


def norm_names(prefix: str, channels: int) -> Shapes:
    parts = ("weight", "bias", "running_mean", "running_var")
    named = {f"{prefix}.{part}": (channels,) for part in parts}
    return {**named, f"{prefix}.num_batches_tracked": ()}


def block_names(prefix: str, inputs: int, width: int, convolutions: int) -> Shapes:
    """layerS.B of a ResNet: 3x3 and 3x3, or 1x1, 3x3 and 1x1 to four times as many."""
    outputs = width if convolutions == 2 else 4 * width
    sizes = {2: (3, 3), 3: (1, 3, 1)}[convolutions]
    channels = [inputs, *[width] * (convolutions - 1), outputs]
    found: Shapes = {}
    for i, size in enumerate(sizes):
        weight = (channels[i + 1], channels[i], size, size)
        found[f"{prefix}.conv{i + 1}.weight"] = weight
        found |= norm_names(f"{prefix}.bn{i + 1}", channels[i + 1])
    first = prefix.endswith(".0")
    # the first stage of the basic blocks keeps its shape: no projection
    if first and not (prefix == "layer1.0" and convolutions == 2):
        found[f"{prefix}.downsample.0.weight"] = (outputs, inputs, 1, 1)
        found |= norm_names(f"{prefix}.downsample.1", outputs)
    return found


def torchvision_names(blocks: tuple[int, ...], convolutions: int) -> Shapes:
    """Every name and shape in the state dict of a torchvision ResNet."""
    found: Shapes = {"conv1.weight": (64, 3, 7, 7), **norm_names("bn1", 64)}
    inputs = 64
    for stage, count in enumerate(blocks, 1):
        width = 64 * 2 ** (stage - 1)
        for block in range(count):
            name = f"layer{stage}.{block}"
            found |= block_names(name, inputs, width, convolutions)
            inputs = width if convolutions == 2 else 4 * width
    return found | {"fc.weight": (1000, inputs), "fc.bias": (1000,)}


@pytest.mark.parametrize("name", TORCHVISION)
def test_imagenet_resnets_have_torchvisions_names_and_shapes(name):
    state = models.build(name, device="meta").state_dict()
    found = {key: tuple(value.shape) for key, value in state.items()}
    assert found == torchvision_names(*TORCHVISION[name])


def test_the_rule_of_names_gives_torchvisions_published_counts():
    # entries of torchvision's state dicts, and their parameters
    for name, entries in (("resnet18", 122), ("resnet50", 320)):
        shapes = torchvision_names(*TORCHVISION[name])
        assert len(shapes) == entries
        kept = [k for k in shapes if k.rsplit(".", 1)[-1] in ("weight", "bias")]
        assert sum(math.prod(shapes[k]) for k in kept) == IMAGENET_PARAMETERS[name]


def test_a_bottlenecks_stride_is_in_its_3x3_convolution():
    first = models.build("resnet50", device="meta").get_submodule("layer2.0")
    strides = {n: m.stride for n, m in first.named_modules() if hasattr(m, "stride")}
    assert strides["conv1"] == (1, 1)
    assert strides["conv2"] == (2, 2)
    assert strides["downsample.0"] == (2, 2)


SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["resnet8", "mlp", "vit"])
def test_small_models_fit_the_small_datasets(name, shape):
    model = models.build_for(name, shape, 7)
    loss = F.cross_entropy(model(torch.randn(2, *shape)), torch.tensor([0, 6]))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_resnet18_runs_on_a_small_image():
    model = models.resnet18(num_classes=5).eval()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)


def test_settings_win_over_what_the_data_implies():
    model = models.build_for("vit", (3, 32, 32), 10, patch=8, depth=1)
    assert model.get_parameter("positions.table.weight").shape[0] == 16


def test_gpt_does_not_see_the_future():
    model = models.gpt(vocabulary=11, context=6, width=16, depth=2, heads=2).double()
    tokens = torch.randint(0, 11, (2, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 6, 11)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_attention_is_the_textbook_formula():
    model = models.gpt(vocabulary=5, context=4, width=8, depth=1, heads=2).double()
    attention = model.get_submodule("blocks.0.attention")
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    qkv = attention.get_submodule("qkv")(x[0])
    q, k, v = (t.view(4, 2, 4).transpose(0, 1) for t in qkv.chunk(3, -1))
    scores = (q @ k.mT / 2).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(4, 8)
    out = attention.get_submodule("out")
    torch.testing.assert_close(attention(x)[0], out(mixed))


def test_gpt_refuses_a_sequence_longer_than_its_context():
    with pytest.raises(ValueError, match=r"length=5. Must be <= context=4"):
        models.gpt(vocabulary=5, context=4)(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_every_weight_of_a_transformer_is_seen_by_hooks(name):
    model = models.build(name, depth=1)
    seen: set[str] = set()
    for key, module in model.named_modules():
        module.register_forward_hook(lambda *_, key=key: seen.add(key))
    model(torch.zeros(1, 8).long() if name == "gpt" else torch.zeros(1, 3, 32, 32))
    assert {k.rsplit(".", 1)[0] for k, _ in model.named_parameters()} <= seen


def test_positions_are_looked_up_for_each_example():
    model = models.build("vit", depth=1)
    seen = []
    table = model.get_submodule("positions.table")
    table.register_forward_hook(lambda m, args, out: seen.append(args[0].shape))
    model(torch.zeros(3, 3, 32, 32))
    assert seen == [(3, 64)]


def test_he_normal_has_the_variance_of_fan_in():
    torch.manual_seed(0)
    conv = nn.Conv2d(32, 64, 3)
    models.he_normal_(conv)
    assert conv.weight.var().item() == pytest.approx(2 / (32 * 9), rel=0.05)
    assert conv.bias is not None
    assert conv.bias.abs().max() == 0


def test_weights_of_norms_can_be_spread_around_one():
    torch.manual_seed(0)
    model = models.resnet20()
    before = {name: p.clone() for name, p in model.named_parameters()}
    models.spread_norms_(model, 0.05)
    changed = [p for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(changed) == len(norms)
    assert all(any(p is norm.weight for norm in norms) for p in changed)
    weights = torch.cat([p.detach() for p in changed])
    assert weights.mean().item() == pytest.approx(1, abs=0.01)
    assert weights.std().item() == pytest.approx(0.05, rel=0.1)


def test_shortcut_subsamples_and_pads_with_zero_channels():
    block = models.resnet8().get_submodule("layer2.0.shortcut")
    x = torch.randn(2, 16, 7, 7)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert out[:, :8].abs().max() == 0
    assert out[:, 24:].abs().max() == 0


def test_channels_last_gives_the_same_answer():
    model = models.resnet8().double().eval()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = model(x)
    layout = models.fastest_layout(model)
    assert layout is torch.channels_last
    model = model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(model(x.to(memory_format=layout)), expected)


def test_models_without_convolutions_stay_contiguous():
    assert models.fastest_layout(models.mlp()) is torch.contiguous_format


def test_an_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match=r"name='resnet21'.*resnet20.*gpt"):
        models.build("resnet21")


@pytest.mark.parametrize("depth", [2, 9, 21])
def test_a_wrong_depth_says_what_is_right(depth):
    with pytest.raises(ValueError, match=f"depth={depth}. Must be 6n"):
        models.CifarResNet(depth)


def test_airbench_whitens_the_images_that_it_is_fitted_to() -> None:
    torch.manual_seed(0)
    images = torch.randn(200, 3, 32, 32) * torch.tensor([3.0, 1.0, 0.2]).view(3, 1, 1)
    model = models.Airbench(width=4)
    model.fit(images)
    out = model.whitening(images)
    rows = out.transpose(0, 1).flatten(1)[:12].double()
    moments = rows @ rows.mT / rows.shape[1]
    # eps is 1/80 of the smallest variance
    torch.testing.assert_close(moments, torch.eye(12).double(), atol=0.03, rtol=0)
    torch.testing.assert_close(out[:, :12], -out[:, 12:])
    assert model(images).shape == (200, 10)


def test_the_rotary_gpt_sees_no_later_token_and_knows_places() -> None:
    torch.manual_seed(0)
    model = models.RotaryGPT(vocabulary=16, context=12, width=16, depth=2, heads=2)
    nn.init.normal_(model.head.weight)
    tokens = torch.randint(16, (2, 12))
    other = tokens.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 16
    assert torch.equal(model(tokens)[:, :7], model(other)[:, :7])
    swapped = torch.cat((tokens[:, [1, 0]], tokens[:, 2:3]), 1)
    assert not torch.allclose(model(swapped)[:, 2], model(tokens[:, :3])[:, 2])
