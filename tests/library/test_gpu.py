"""What runs wherever CUDA is: the same numbers as on the CPU. See CONTRIBUTING."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad
from natgrad.math.conv.geometry import ConvGeometry
from natgrad.math.conv.moments import conv_input_moment, conv_output_moment
from natgrad.math.statistics import gram, input_moment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no CUDA device"
    ),
]
DEVICE = "cuda"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(inplace=True),
        nn.Conv2d(24, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(8 * 3 * 3, 5),
    )


def kfac(model: nn.Module) -> Callable[[], object]:
    host = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    preconditioner = natgrad.KFAC(model, host)

    def step() -> None:
        preconditioner.step()
        host.step()

    return step


METHODS: dict[str, Callable[[nn.Module], Callable[[], object]]] = {
    "kfac": kfac,
    "spngd": lambda model: natgrad.SPNGD(model, lr=0.05).step,
    "polar": lambda model: natgrad.Polar(model, lr=0.05).step,
}


def trained(method: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """The losses of eight steps, and the weights after them."""
    model = copy.deepcopy(network()).to(device, dtype)
    step = METHODS[method](model)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(32, 3, 8, 8, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 5, (32,), generator=draw).to(device)
    losses: list[Tensor] = []
    for _ in range(8):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device, dtype)), y)
        loss.backward()
        step()
        losses.append(loss.detach().cpu())
    return [torch.stack(losses), *(p.detach().cpu() for p in model.parameters())]


@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_trains_to_the_weights_of_the_cpu(method: str) -> None:
    there, here = (trained(method, d, torch.float64) for d in (DEVICE, "cpu"))
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_losses_fall_in_float32(method: str) -> None:
    losses = trained(method, DEVICE, torch.float32)[0]
    assert losses.isfinite().all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_moments_of_convolutions_are_those_of_the_cpu(kernel: int, stride: int) -> None:
    side = kernel // 2
    geometry = ConvGeometry(
        kernel=(kernel, kernel),
        stride=(stride, stride),
        padding=((side, side), (side, side)),
        dilation=(1, 1),
        groups=1,
        padding_mode="zeros",
        bias=True,
    )
    x = torch.randn(4, 40, 9, 10, dtype=torch.float64)
    pairs = [
        (conv_input_moment(x.to(DEVICE), geometry), conv_input_moment(x, geometry)),
        (conv_output_moment(x.to(DEVICE)), conv_output_moment(x)),
    ]
    for there, here in pairs:
        torch.testing.assert_close(there.cpu(), here, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    """By Tensor Cores: as exact as float32 products of the same rounded numbers."""
    rows = torch.randn(3000, 96).to(dtype)
    for moment in (gram, lambda x: input_moment(x, bias=True)):
        there, here = moment(rows.to(DEVICE)).cpu(), moment(rows)
        assert there.dtype == torch.float32
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-2)
