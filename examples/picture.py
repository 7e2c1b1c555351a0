"""Learn a picture: a sine network from a pixel's place to its colour, nothing to set.

Writes before.png and after.png; ``python examples/picture.py 320`` takes 320 steps.
"""

import sys
from math import log10

import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

import natgrad

HEIGHT, WIDTH = 64, 96


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 128), Sine(), nn.Linear(128, 128), Sine(), nn.Linear(128, 3)
    )
    with torch.no_grad():  # a first layer of many frequencies, as SIREN has it
        model[0].weight.uniform_(-15, 15)
    return model


def save(pixels: Tensor, name: str) -> None:
    shaped = (255 * pixels.detach().clamp(0, 1)).round().byte()
    Image.fromarray(shaped.reshape(HEIGHT, WIDTH, 3).numpy()).save(name)


def main(steps: int) -> None:
    image = Image.fromarray(load_sample_image("china.jpg")).resize((WIDTH, HEIGHT))
    colours = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    colours = colours.reshape(-1, 3).float() / 255
    rows, columns = torch.linspace(-1, 1, HEIGHT), torch.linspace(-1, 1, WIDTH)
    places = torch.cartesian_prod(rows, columns)
    save((model := network())(places), "before.png")
    optimizer = natgrad.SPNGD(model, lr="auto", momentum="auto", damping="auto")

    def closure() -> tuple[Tensor, Tensor]:
        outputs = model(places)
        return outputs, nn.functional.mse_loss(outputs, colours)

    for step in range(steps):
        loss = float(optimizer.step(closure))
        if step % 20 == 0:
            print(f"step {step}: {-10 * log10(loss):.1f} dB", flush=True)
    save(model(places), "after.png")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 160)
