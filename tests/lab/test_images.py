"""Images decoded, cut and finished by threads, against Pillow and whole batches."""

import io
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.pictures import SIZES, jpeg, picture, write_imagenet
from PIL import Image
from torch.nn import functional as F

from natgrad_lab import data
from natgrad_lab.augment import (
    Chain,
    Finish,
    MiddleCrop,
    Normalize,
    RandomCropFlip,
    RandomErasing,
    ResizedCrop,
    StretchedCrop,
)
from natgrad_lab.augment.windows import fitted
from natgrad_lab.data.images import Files, ImageSplit, View, cores
from natgrad_lab.data.jpeg import ImageError, encode, read_resized, read_window

BILINEAR = Image.Resampling.BILINEAR


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    """JPEGs of ImageNet's sizes."""
    rng = np.random.default_rng(1)
    return [jpeg(picture(rng, *size)) for size in SIZES]


class Held:
    """A source in memory."""

    def __init__(self, images: Sequence[bytes]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> bytes:
        return self.images[index]

    def name(self, index: int) -> str:
        return f"image {index}"


def held(images: Sequence[bytes], threads: int = 2) -> ImageSplit:
    return ImageSplit(Held(images), torch.arange(len(images)), threads=threads)


def stretched_by_pillow(image: bytes, side: int = 256) -> np.ndarray:
    """How images were read before."""
    opened = Image.open(io.BytesIO(image))
    opened.draft("RGB", (side, side))
    return np.array(opened.convert("RGB").resize((side, side), BILINEAR))


def uniforms(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, k, generator=torch.Generator().manual_seed(seed))


# -- one image ------------------------------------------------------------------------


@pytest.mark.parametrize("mirror", [0.2, 0.7])
def test_a_stretched_crop_is_pillows(pictures: list[bytes], mirror: float) -> None:
    out = np.empty((224, 224, 3), np.uint8)
    for image in pictures:
        read_window(image, StretchedCrop(224, 256), (0.4, 0.99, mirror), out)
        wanted = stretched_by_pillow(image)[13:237, 32:256]
        wanted = wanted[:, ::-1] if mirror < 0.5 else wanted
        assert np.abs(out.astype(int) - wanted).max() <= 2


def test_a_resized_crop_is_pillows(pictures: list[bytes]) -> None:
    out, crop = np.empty((224, 224, 3), np.uint8), ResizedCrop(224)
    for i, image in enumerate(pictures):
        draws = tuple(uniforms(1, crop.randoms, i)[0].tolist())
        read_window(image, crop, draws, out)
        whole = Image.open(io.BytesIO(image))
        cut = crop.cut(whole.height, whole.width, draws)
        box = (cut.left, cut.top, cut.left + cut.width, cut.top + cut.height)
        wanted = np.asarray(whole.crop(box).resize((224, 224), BILINEAR))
        wanted = wanted[:, ::-1] if cut.mirror else wanted
        assert np.abs(out.astype(int) - wanted).max() <= 2


def test_a_large_image_is_decoded_smaller_and_looks_the_same() -> None:
    image = jpeg(picture(np.random.default_rng(2), 900, 1200))
    out, crop = np.empty((224, 224, 3), np.uint8), ResizedCrop(224, area=(0.5, 0.5))
    draws = tuple(uniforms(1, crop.randoms)[0].tolist())
    read_window(image, crop, draws, out)
    whole, cut = Image.open(io.BytesIO(image)), crop.cut(900, 1200, draws)
    box = (cut.left, cut.top, cut.left + cut.width, cut.top + cut.height)
    wanted = np.array(whole.crop(box).resize((224, 224), BILINEAR))
    wanted = wanted[:, ::-1] if cut.mirror else wanted
    found, true = (coarse(x) for x in (out, wanted))
    assert (found - true).abs().mean() < 2
    assert (found - coarse(np.roll(wanted, 4, 0))).abs().mean() > 4


def coarse(pixels: np.ndarray) -> torch.Tensor:
    """Means of squares: decoding smaller is another filter, cut at whole pixels."""
    planes = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float()
    return F.avg_pool2d(planes, 4)


def test_resizing_is_torchs_antialiasing(pictures: list[bytes]) -> None:
    pixels = np.array(Image.open(io.BytesIO(pictures[0])))
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    wanted = F.interpolate(planes, (300, 260), mode="bilinear", antialias=True)[0]
    found = torch.from_numpy(read_resized(pictures[0], 300, 260)).permute(2, 0, 1)
    assert (found.int() - wanted.int()).abs().max() <= 2


@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"), ("P", "PNG")]
)
def test_odd_files_are_read_as_well(mode: str, kind: str) -> None:
    """ImageNet has grey and CMYK JPEGs, and a PNG with another name."""
    image = Image.fromarray(picture(np.random.default_rng(3), 300, 280)).convert(mode)
    file = io.BytesIO()
    image.save(file, kind)
    out = np.empty((224, 224, 3), np.uint8)
    read_window(file.getvalue(), MiddleCrop(224, 256), (), out)
    wanted = stretched_by_pillow(file.getvalue())[16:240, 16:240]
    assert np.abs(out.astype(int) - wanted).mean() < 3


@pytest.mark.parametrize("cut", [0, 100, 5000])
def test_what_is_no_whole_image_is_an_error(pictures: list[bytes], cut: int) -> None:
    out = np.empty((224, 224, 3), np.uint8)
    with pytest.raises(ImageError):
        read_window(pictures[0][:cut], MiddleCrop(224, 256), (), out)


def test_an_image_is_encoded_within_its_bytes() -> None:
    noise = np.random.default_rng(4).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    assert len(encode(noise, 100, 10**9)) > 120_000
    assert len(encode(noise, 100, 120_000)) <= 120_000


# -- windows --------------------------------------------------------------------------


def torchvisions(
    rng: random.Random, height: int, width: int
) -> tuple[int, int, int, int]:
    """RandomResizedCrop as torchvision documents it: top, left, height, width."""
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            top = rng.randint(0, height - tall)
            return top, rng.randint(0, width - wide), tall, wide
    raise AssertionError("never, for these sizes")


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333)])
def test_resized_crops_are_distributed_as_torchvisions(height: int, width: int) -> None:
    """Area, aspect and place: means and deviations of 4,000 draws, and quantiles."""
    crop, rng = ResizedCrop(224), random.Random(0)
    rows = uniforms(4000, crop.randoms).tolist()
    cuts = [crop.cut(height, width, row) for row in rows]
    ours = np.array([(c.top, c.left, c.height, c.width) for c in cuts], float)
    theirs = np.array([torchvisions(rng, height, width) for _ in range(4000)], float)
    for one, other in ((ours, theirs),):
        for statistic in (_area, _aspect, _middle_row, _middle_column):
            a, b = np.sort(statistic(one)), np.sort(statistic(other))
            # Kolmogorov and Smirnov: 1.95 sqrt(2 / n) is one in a thousand
            both = np.sort(np.concatenate([a, b]))
            shares = [np.searchsorted(x, both, "right") / len(x) for x in (a, b)]
            assert np.abs(shares[0] - shares[1]).max() < 1.95 * math.sqrt(2 / 4000)
    assert abs(np.mean([c.mirror for c in cuts]) - 0.5) < 0.03
    assert all((c.tall, c.wide) == (224, 224) for c in cuts)


def _area(boxes: np.ndarray) -> np.ndarray:
    return boxes[:, 2] * boxes[:, 3]


def _aspect(boxes: np.ndarray) -> np.ndarray:
    return boxes[:, 3] / boxes[:, 2]


def _middle_row(boxes: np.ndarray) -> np.ndarray:
    return boxes[:, 0] + boxes[:, 2] / 2


def _middle_column(boxes: np.ndarray) -> np.ndarray:
    return boxes[:, 1] + boxes[:, 3] / 2


@pytest.mark.parametrize(
    ("size", "middle"),
    [((10, 2000), (0, 993, 10, 13)), ((2000, 10), (993, 0, 13, 10))],
)
def test_a_resized_crop_of_a_stripe_is_its_middle(
    size: tuple[int, int], middle: tuple[int, ...]
) -> None:
    crop = ResizedCrop(64, area=(0.9, 1.0))
    assert crop.cut(*size, [0.5] * crop.randoms)[:4] == middle


def test_middle_crops_keep_the_aspect_or_stretch() -> None:
    assert MiddleCrop(224, 256).cut(300, 600) == (0, 0, 300, 600, 256, 256, 16, 16, 0)
    own = MiddleCrop(224, 256, stretched=False).cut(300, 600)
    assert own == (0, 0, 300, 600, 256, 512, 16, 144, 0)
    assert fitted(600, 300, 256) == (512, 256)


@pytest.mark.parametrize("wrong", [{"area": (0, 1)}, {"aspect": (2, 1)}])
def test_wrong_ranges_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=f"Invalid {next(iter(wrong))}="):
        ResizedCrop(**wrong)


def test_a_window_larger_than_its_square_is_refused() -> None:
    with pytest.raises(ValueError, match=r"size=300. Must be in 1 to stored=256"):
        StretchedCrop(300, 256)


# -- batches --------------------------------------------------------------------------

MEAN = torch.rand(3, 224, 224, generator=torch.Generator().manual_seed(5)) * 255


def chain(erasing: float) -> Chain:
    """What made a batch of whole images before."""
    normalize = Normalize(MEAN, torch.tensor(255.0))
    return Chain(
        [RandomCropFlip(size=224), normalize, RandomErasing(probability=erasing)]
    )


def view(erasing: float, **options: bool) -> View:
    normalize = Normalize(MEAN, torch.tensor(255.0))
    finish = Finish(normalize, RandomErasing(probability=erasing))
    return View(window=StretchedCrop(224, 256), finish=finish, **options)


def test_a_view_is_the_chain_of_batch_transforms(pictures: list[bytes]) -> None:
    """The same numbers draw the same windows, flips and rectangles."""
    draws, indices = uniforms(6, 9), torch.tensor([5, 0, 3, 3, 1, 2])
    found, labels = held(pictures).view(indices, view(0.5), draws)
    whole = np.stack([stretched_by_pillow(pictures[i]) for i in indices])
    wanted = chain(0.5)(torch.from_numpy(whole).permute(0, 3, 1, 2), draws)
    assert torch.equal(labels, indices)
    assert torch.equal(found == 0, wanted == 0)
    assert (found - wanted).abs().max() <= 2.01 / 255
    assert (found - wanted).abs().mean() < 0.1 / 255


def test_batches_are_distributed_as_before(pictures: list[bytes]) -> None:
    """Other numbers: means and deviations over images and pixels, and what is zero."""
    count = 96
    indices = torch.arange(count) % len(pictures)
    found, _ = held(pictures).view(indices, view(0.5), uniforms(count, 9, 1))
    whole = np.stack([stretched_by_pillow(each) for each in pictures])
    batch = torch.from_numpy(whole).permute(0, 3, 1, 2)[indices]
    wanted = chain(0.5)(batch, uniforms(count, 9, 2))
    spread = wanted.flatten(1).mean(1).std() / math.sqrt(count)
    assert (found.mean() - wanted.mean()).abs() < 4 * spread
    assert found.std() == pytest.approx(wanted.std().item(), rel=0.05)
    zeros = [(x == 0).all(1).float().mean().item() for x in (found, wanted)]
    assert zeros[0] == pytest.approx(zeros[1], abs=0.02)
    # and where: means of a coarse grid of places
    grids = [F.adaptive_avg_pool2d(x.abs(), 4).mean((0, 1)) for x in (found, wanted)]
    torch.testing.assert_close(grids[0], grids[1], rtol=0.1, atol=0)


def test_pixels_finished_by_the_batch_are_those_finished_one_by_one(
    pictures: list[bytes],
) -> None:
    split, draws = held(pictures), uniforms(6, 9)
    whole, _ = split.view(torch.arange(6), view(0.7), draws)
    pixels, _ = split.view(
        torch.arange(6), View(window=StretchedCrop(224, 256)), draws[:, :3]
    )
    assert pixels.dtype == torch.uint8
    rest = Chain([Normalize(MEAN, torch.tensor(255.0)), RandomErasing(probability=0.7)])
    torch.testing.assert_close(rest(pixels, draws[:, 3:]), whole)


@pytest.mark.parametrize("last", [True, False])
def test_a_view_has_the_layout_asked_for(pictures: list[bytes], last: bool) -> None:
    found, _ = held(pictures).view(
        torch.arange(2), view(0.0, channels_last=last), uniforms(2, 9)
    )
    layout = torch.channels_last if last else torch.contiguous_format
    assert found.is_contiguous(memory_format=layout)


def test_a_failure_in_a_thread_names_the_image(pictures: list[bytes]) -> None:
    split = held([*pictures, b"no image"])
    with pytest.raises(data.DataError, match=r"image 6 cannot be read .*image-net"):
        split.fetch(torch.arange(7))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    split = ImageSplit(Files([tmp_path / "gone.JPEG"]), torch.zeros(1).long())
    with pytest.raises(data.DataError, match=r"gone\.JPEG cannot be read"):
        split.fetch(torch.arange(1))


def test_local_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores() == max(1, alone // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert cores() == 1


# -- datasets -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data")
    write_imagenet(place, train=3, val=2, sizes=SIZES[:3])
    return place


def test_the_device_makes_the_batches_that_the_host_makes(root: Path) -> None:
    """Two ranks, each on its own share; erasing and all."""
    loaded = data.load("imagenet", root, size=64)
    settings: dict[str, Any] = {"batch_size": 6, "test_batch_size": 4}
    settings |= {"erasing": 0.5, "prefetch": 0}
    for rank in range(2):
        place: dict[str, Any] = {"rank": rank, "world": 2}
        host = data.loaders(loaded, **settings, **place)
        device = data.loaders(
            loaded, **settings, **place, device=torch.device("cpu"), channels_last=True
        )
        for ours, theirs in zip(host, device, strict=True):
            for (x, labels), (y, same) in zip(ours, theirs, strict=True):
                assert torch.equal(labels, same)
                assert y.is_contiguous(memory_format=torch.channels_last)
                torch.testing.assert_close(x, y)


def test_resized_crops_are_normalised_as_torchvision_does(root: Path) -> None:
    loaded = data.load("imagenet", root, crop="resized", size=112)
    train, test = data.loaders(loaded, batch_size=6, test_batch_size=4, prefetch=0)
    images, labels = next(iter(test))
    assert labels.tolist() == [0, 0, 1, 1]
    path = root / "imagenet/val/n0/val_0.JPEG"
    whole = Image.open(path).resize((170, 128), BILINEAR)
    pixels = coarse(np.asarray(whole)[8:120, 29:141]).numpy() / 255
    mean, std = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
    wanted = (pixels - mean[:, None, None]) / std[:, None, None]
    found = F.avg_pool2d(images[0], 4).numpy()
    assert np.abs(found - wanted).mean() < 0.02
    assert next(iter(train))[0].shape == (6, 3, 112, 112)


class Two:
    """The first of two ranks; the other's sum is known."""

    rank, size = 0, 2

    def __init__(self, other: torch.Tensor) -> None:
        self.other = other

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + (self.other if tensor.dim() else tensor)


def test_ranks_share_the_reading_for_the_mean(root: Path) -> None:
    loaded = data.load("imagenet", root)
    (kept,) = (root / "imagenet").glob("mean-*.npy")
    assert isinstance(loaded.train, ImageSplit)
    images = loaded.train.fetch(torch.arange(6))[0].double()
    (root / "imagenet" / kept.name).unlink()
    told: list[tuple[str, int, int]] = []
    shared = data.load(
        "imagenet",
        root,
        ranks=Two(images[1::2].sum(0)),
        progress=lambda *done: told.append(done),
    )
    assert told == [("mean image", 3, 3)]
    assert shared.mean is not None
    torch.testing.assert_close(shared.mean, images.mean(0)[:, :224, :224].float())
    torch.testing.assert_close(shared.mean, loaded.mean)
