"""Augmentation against loops over images, and its distributions."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad_lab.augment import (
    CenterCrop,
    Chain,
    ImageMixup,
    Normalize,
    RandomCropFlip,
    RandomErasing,
    RunningMixup,
    crop,
    soft_targets,
)
from natgrad_lab.augment.base import whole_number


def images(n: int = 8, channels: int = 3, height: int = 7, width: int = 5):
    g = torch.Generator().manual_seed(n)
    shape = (n, channels, height, width)
    return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)


def uniforms(n: int, k: int, seed: int = 0):
    return torch.rand(n, k, generator=torch.Generator().manual_seed(seed))


@given(
    padding=st.integers(0, 3),
    size=st.none() | st.integers(1, 5),
    flip=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_crop_and_flip_equal_a_loop(padding, size, flip, seed):
    batch, draws = images(), uniforms(8, 3, seed)
    out = RandomCropFlip(size=size, padding=padding, flip=flip)(batch, draws)
    tall, wide = (size, size) if size else batch.shape[2:]
    for i, (top, left, mirror) in enumerate(draws.tolist()):
        image = F.pad(batch[i], (padding,) * 4)
        y = math.floor(top * (image.shape[1] - tall + 1))
        x = math.floor(left * (image.shape[2] - wide + 1))
        expected = image[:, y : y + tall, x : x + wide]
        if flip and mirror < 0.5:
            expected = expected.flip(2)
        assert torch.equal(out[i], expected)


def test_every_window_is_equally_likely():
    batch = torch.arange(9, dtype=torch.uint8).view(1, 1, 3, 3).expand(90_000, 1, 3, 3)
    out = RandomCropFlip(size=1, flip=False)(batch, uniforms(90_000, 3))
    counts = torch.bincount(out.flatten().long(), minlength=9)
    assert (counts - 10_000).abs().max() < 5 * math.sqrt(10_000)


def test_the_largest_uniform_gives_the_last_place():
    counts = torch.arange(1, 5000)
    almost = torch.full((4999,), 1 - 2**-24)
    assert torch.equal(whole_number(almost, counts), counts - 1)


def test_too_large_a_crop_is_refused():
    with pytest.raises(ValueError, match="crop size=8 of 7 x 5"):
        RandomCropFlip(size=8)(images())


def test_crop_takes_channels_last_images():
    batch = images()
    zero = torch.zeros(8, dtype=torch.long)
    last = batch.contiguous(memory_format=torch.channels_last)
    args = (zero, zero, zero.bool(), (3, 3))
    assert torch.equal(crop(last, *args), crop(batch, *args))


def test_center_crop_is_the_middle():
    batch = images(height=7, width=5)
    assert torch.equal(CenterCrop(3)(batch), batch[:, :, 2:5, 1:4])


@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 7, 5)])
def test_normalize_subtracts_and_divides(shape):
    batch, mean = images(), torch.rand(shape) * 255
    std = torch.tensor([50.0, 60.0, 70.0]).view(3, 1, 1)
    out = Normalize(mean, std)(batch)
    torch.testing.assert_close(out, (batch.float() - mean) / std, rtol=1e-5, atol=1e-5)


def test_normalize_leaves_its_input_alone_and_can_change_layout():
    batch = images().float()
    before = batch.clone()
    one = torch.ones(3, 1, 1)
    out = Normalize(one, one, channels_last=True)(batch)
    Normalize(one, one)(batch)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch, before)


def test_erasing_equals_a_loop():
    erase, batch, draws = RandomErasing(), torch.randn(64, 3, 12, 10), uniforms(64, 6)
    expected = batch.clone()
    for i, (p, s, r, switch, y, x) in enumerate(draws.tolist()):
        if p >= 0.5:
            continue
        area, aspect = (0.02 + 0.23 * s) * 120, 0.3 + 0.7 * r
        tall, wide = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if switch >= 0.5:
            tall, wide = wide, tall
        tall, wide = max(1, min(round(tall), 12)), max(1, min(round(wide), 10))
        y, x = math.floor(y * (13 - tall)), math.floor(x * (11 - wide))
        expected[i, :, y : y + tall, x : x + wide] = 0
    assert torch.equal(erase(batch, draws), expected)


def test_erasing_keeps_to_its_ranges():
    boxes = RandomErasing().boxes(uniforms(20_000, 6), 100, 100)
    top, left, tall, wide = (b.double() for b in boxes)
    hit = tall > 0
    assert hit.double().mean().item() == pytest.approx(0.5, abs=0.02)
    area = (tall * wide)[hit] / 10_000
    assert area.min() > 0.015
    assert area.max() < 0.26
    assert area.mean().item() == pytest.approx((0.02 + 0.25) / 2, rel=0.02)
    aspect = (tall / wide)[hit]
    assert (aspect <= 1).double().mean().item() == pytest.approx(0.5, abs=0.05)
    assert torch.minimum(aspect, 1 / aspect).min() > 0.25
    assert (top + tall).max() <= 100
    assert (left + wide).max() <= 100


@pytest.mark.parametrize(
    "wrong", [{"probability": 2}, {"area": (0, 1)}, {"aspect": (2, 1)}]
)
def test_erasing_refuses_wrong_ranges(wrong):
    with pytest.raises(ValueError, match=f"Invalid {next(iter(wrong))}="):
        RandomErasing(**wrong)


def test_chain_gives_each_transform_its_own_numbers():
    one, two = RandomCropFlip(padding=2), RandomErasing(probability=1)
    chain, batch = Chain([one, two]), torch.randn(4, 3, 8, 8)
    draws = uniforms(4, 9)
    assert chain.randoms == 9
    expected = two(one(batch, draws[:, :3]), draws[:, 3:])
    assert torch.equal(chain(batch, draws), expected)


def test_a_slice_of_the_batch_is_changed_as_in_the_whole():
    chain = Chain([RandomCropFlip(padding=2), RandomErasing()])
    batch, draws = torch.randn(6, 3, 8, 8), uniforms(6, 9)
    assert torch.equal(chain(batch[2:5], draws[2:5]), chain(batch, draws)[2:5])


def test_wrong_uniforms_are_refused():
    with pytest.raises(ValueError, match=r"shape=\(8, 2\). Must be \(8, 3\)"):
        RandomCropFlip()(images(), torch.rand(8, 2))


def test_running_mixup_is_the_recursion():
    mix = RunningMixup(0.4, seed=3)
    xs = torch.randn(5, 4, 2, dtype=torch.float64)
    ys = torch.rand(5, 4, 3, dtype=torch.float64).softmax(-1)
    x, y = mix(xs[0], ys[0])
    assert torch.equal(x, xs[0])
    assert torch.equal(y, ys[0])
    for t in range(1, 5):
        lam = mix.weight(t)
        x, y = lam * xs[t] + (1 - lam) * x, lam * ys[t] + (1 - lam) * y
        mixed, target = mix(xs[t], ys[t])
        torch.testing.assert_close(mixed, x)
        torch.testing.assert_close(target, y)


@pytest.mark.parametrize("alpha", [0.2, 0.4, 1.0, 3.0])
def test_mixup_weights_are_beta(alpha):
    mix = RunningMixup(alpha)
    draws = torch.tensor([mix.weight(t) for t in range(4000)], dtype=torch.float64)
    assert draws.mean().item() == pytest.approx(0.5, abs=0.03)
    variance = 1 / (4 * (2 * alpha + 1))
    assert draws.var().item() == pytest.approx(variance, rel=0.07)


def test_mixup_resumes_exactly():
    batches = [(torch.randn(4, 2), torch.rand(4, 3)) for _ in range(6)]
    straight, first = RunningMixup(seed=1), RunningMixup(seed=1)
    expected = [straight(*b) for b in batches]
    for b in batches[:3]:
        first(*b)
    second = RunningMixup(seed=1)
    second.load_state_dict(first.state_dict())
    for got, want in zip([second(*b) for b in batches[3:]], expected[3:], strict=True):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_mixup_on_two_ranks_is_mixup_on_one():
    batches = [(torch.randn(4, 2), torch.rand(4, 3)) for _ in range(3)]
    whole, ranks = RunningMixup(), [RunningMixup(), RunningMixup()]
    for x, y in batches:
        parts = [ranks[r](x[2 * r :][:2], y[2 * r :][:2])[0] for r in range(2)]
        assert torch.equal(torch.cat(parts), whole(x, y)[0])


def test_mixup_in_parts_is_mixup_at_once():
    batches = [(torch.randn(6, 2), torch.rand(6, 3)) for _ in range(4)]
    whole, cut = RunningMixup(seed=2), RunningMixup(seed=2, parts=3)
    for x, y in batches:
        expected = whole(x, y)
        pieces = [cut(x[2 * k :][:2], y[2 * k :][:2]) for k in range(3)]
        for i in range(2):
            assert torch.equal(torch.cat([p[i] for p in pieces]), expected[i])


def test_mixup_resumes_in_the_middle_of_a_step():
    parts = [(torch.randn(4, 2), torch.rand(4, 3)) for _ in range(9)]
    straight, first = RunningMixup(parts=3), RunningMixup(parts=3)
    expected = [straight(*part) for part in parts]
    for part in parts[:5]:
        first(*part)
    second = RunningMixup(parts=3)
    second.load_state_dict(first.state_dict())
    for part, want in zip(parts[5:], expected[5:], strict=True):
        assert torch.equal(second(*part)[0], want[0])


def test_mixup_refuses_no_parts():
    with pytest.raises(ValueError, match=r"parts=0. Must be >= 1"):
        RunningMixup(parts=0)


def test_mixup_starts_anew_when_the_batch_changes_shape():
    mix = RunningMixup()
    mix(torch.randn(4, 2), torch.rand(4, 3))
    small = torch.randn(3, 2)
    assert torch.equal(mix(small, torch.rand(3, 3))[0], small)


def test_image_mixup_is_the_recursion_with_a_weight_an_image():
    mix = ImageMixup(0.4, seed=3)
    xs = torch.randn(5, 4, 2, dtype=torch.float64)
    ys = torch.rand(5, 4, 3, dtype=torch.float64).softmax(-1)
    x, y = mix(xs[0], ys[0])
    assert torch.equal(x, xs[0])
    for t in range(1, 5):
        lam = mix.weights(t, 4)
        assert len(set(lam.tolist())) == 4
        x = torch.stack([lam[i] * xs[t][i] + (1 - lam[i]) * x[i] for i in range(4)])
        y = torch.stack([lam[i] * ys[t][i] + (1 - lam[i]) * y[i] for i in range(4)])
        mixed, target = mix(xs[t], ys[t])
        torch.testing.assert_close(mixed, x)
        torch.testing.assert_close(target, y)


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_image_mixup_weights_are_the_larger_half_of_beta(alpha):
    draws = ImageMixup(alpha).weights(1, 4000)
    assert draws.min() >= 0.5
    folded = torch.distributions.Beta(alpha, alpha).sample((100_000,))
    folded = torch.maximum(folded, 1 - folded)
    assert draws.mean().item() == pytest.approx(folded.mean().item(), abs=0.01)
    assert draws.var().item() == pytest.approx(folded.var().item(), rel=0.1)


def test_image_mixup_erases_what_it_has_mixed_and_keeps_that():
    erase = RandomErasing(probability=1.0)
    mix, plain = ImageMixup(seed=1, erasing=erase), ImageMixup(seed=1)
    batches = [(torch.rand(4, 3, 8, 8) + 1, torch.rand(4, 3)) for _ in range(2)]
    first, _ = mix(*batches[0])
    assert torch.equal(first[first != 0], batches[0][0][first != 0])
    assert (first == 0).flatten(1).any(1).all()
    second, _ = mix(*batches[1])
    lam = plain.weights(1, 4).view(-1, 1, 1, 1).float()
    expected = lam * batches[1][0] + (1 - lam) * first
    kept = second != 0
    assert not kept.all()
    torch.testing.assert_close(second[kept], expected[kept])


def test_image_mixup_keeps_channels_last():
    mix = ImageMixup(erasing=RandomErasing(probability=1.0))
    for _ in range(2):
        x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
        mixed, _ = mix(x, torch.rand(4, 3))
        assert mixed.is_contiguous(memory_format=torch.channels_last)


def test_image_mixup_on_two_ranks_is_that_on_one():
    erase = RandomErasing(probability=0.5)
    whole = ImageMixup(erasing=erase)
    ranks = [ImageMixup(erasing=erase, rank=r, world=2) for r in range(2)]
    for _ in range(3):
        x, y = torch.randn(4, 3, 8, 8), torch.rand(4, 3)
        parts = [ranks[r](x[2 * r :][:2], y[2 * r :][:2]) for r in range(2)]
        expected = whole(x, y)
        for i in range(2):
            assert torch.equal(torch.cat([p[i] for p in parts]), expected[i])


def test_image_mixup_resumes_exactly():
    batches = [(torch.randn(4, 3, 8, 8), torch.rand(4, 3)) for _ in range(6)]
    make = partial(ImageMixup, seed=1, erasing=RandomErasing())
    straight, first, second = make(), make(), make()
    expected = [straight(*b) for b in batches]
    for b in batches[:3]:
        first(*b)
    second.load_state_dict(first.state_dict())
    for got, want in zip([second(*b) for b in batches[3:]], expected[3:], strict=True):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_mixup_refuses_class_numbers():
    with pytest.raises(ValueError, match="soft_targets"):
        RunningMixup()(torch.randn(2, 2), torch.tensor([0, 1]))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_targets_give_torchs_own_label_smoothing(smoothing):
    logits, labels = torch.randn(6, 4), torch.randint(0, 4, (6,))
    target = soft_targets(labels, 4, smoothing)
    torch.testing.assert_close(target.sum(-1), torch.ones(6))
    torch.testing.assert_close(
        F.cross_entropy(logits, target),
        F.cross_entropy(logits, labels, label_smoothing=smoothing),
    )


def test_soft_targets_refuse_a_smoothing_of_one():
    with pytest.raises(ValueError, match=r"smoothing=1. Must be in \[0, 1\)"):
        soft_targets(torch.tensor([0]), 2, 1)
