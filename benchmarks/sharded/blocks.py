"""What `gather_inputs=False` changes: A of row-parallel layers in blocks, one a rank.

    python -m benchmarks.sharded.blocks
    python -m benchmarks.sharded.blocks --steps 5

One process stands for 2, 4 and 8 peers: a factor that is cut as they cut it is the
same factor. A small transformer learns bytes of Python, the library's own source, from
the same batches each time. Printed: of the layers whose inputs are cut, how much of A
(in the Frobenius norm) is outside of the blocks and the cosine between the updates with
the whole A and with its blocks, both at the end of the exact run; and the loss on text
that was not trained on.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad
from benchmarks.common import markdown_table, say
from benchmarks.sharded.models import Layer, Size, Transformer
from natgrad.layers import LayerOptions, Layout
from natgrad.layers.matrices import Linear
from natgrad.math.inverse import damped_roots
from natgrad.math.parts import diagonal_parts
from natgrad.math.polar import polar
from natgrad.math.rules import whiten, whiten_back

SIZE = Size(width=64, keys=32, inner=256, layers=2, heads=4, words=256)
BATCH, LENGTH = 32, 48
PEERS = (1, 2, 4, 8)


class Cut(nn.Linear):
    """A layer whose inputs tensor parallelism cuts."""

    peers = 1


class InBlocks(Linear):
    """Its kind: A in as many blocks as there are peers."""

    def layout(self, module: nn.Module) -> Layout:
        found = Linear(LayerOptions(bias=self.options.bias)).layout(module)
        return replace(found, apart=found.cols // Cut.peers)


def source() -> Tensor:
    """The library's own source, as bytes."""
    files = sorted(Path(natgrad.__file__).parent.rglob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(text: Tensor, count: int, seed: int) -> list[Tensor]:
    """Pieces of text, one byte longer than what is read."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (count, BATCH), generator=draw)
    return [torch.stack([text[i : i + LENGTH + 1] for i in each]) for each in starts]


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """Nats a byte."""
    scores = model(words[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def train(peers: int, steps: int) -> tuple[float, list[tuple[Tensor, Tensor]]]:
    """The loss afterwards; A and the last gradient of each layer that is cut."""
    Cut.peers = peers
    torch.manual_seed(0)
    model = Transformer(SIZE)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.out.__class__ = layer.down.__class__ = Cut
    text = source()
    cut = len(text) * 9 // 10
    with natgrad.Polar(model, lr=0.03, loss="tokens") as optimizer:
        for words in batches(text[:cut], steps, 0):
            optimizer.zero_grad()
            loss_of(model, words).backward()
            optimizer.step()
        found: list[tuple[Tensor, Tensor]] = []
        for name, module in model.named_modules():
            if isinstance(module, Cut):
                assert module.weight.grad is not None
                a = optimizer.statistic(f"{name}/A")
                found.append((a, module.weight.grad.detach()[None]))
    with torch.no_grad():
        held = [loss_of(model, words) for words in batches(text[cut:], 20, 1)]
    return float(torch.stack(held).mean()), found


def in_blocks(a: Tensor, peers: int) -> Tensor:
    """``(1, n, n)`` without what is between the inputs of two peers."""
    parts = diagonal_parts(a, peers, a.shape[-1] // peers)
    return torch.block_diag(*parts)[None]


def update(a: Tensor, g: Tensor) -> Tensor:
    """Polar's, with the damping of its defaults."""
    damping = natgrad.Polar.defaults.damping
    assert isinstance(damping, float)
    mean = float(a.diagonal(dim1=1, dim2=2).mean())
    (root,) = damped_roots([a], [damping * mean])
    assert isinstance(root, Tensor)
    return whiten_back(polar(whiten(g, root, None)), root, None)


def compare(found: list[tuple[Tensor, Tensor]], peers: int) -> tuple[float, float]:
    """The largest share of A outside of blocks, and the smallest cosine."""
    shares, cosines = list[float](), list[float]()
    for a, g in found:
        blocks = in_blocks(a, peers)
        shares.append(float((a - blocks).norm() / a.norm()))
        whole, cut = (update(x, g).flatten() for x in (a, blocks))
        cosines.append(float(F.cosine_similarity(whole, cut, 0)))
    return max(shares), min(cosines)


def main() -> None:
    """Train, compare, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    natgrad.register_layer(Cut, InBlocks)
    exact: list[tuple[Tensor, Tensor]] = []
    rows: list[list[str]] = []
    for peers in PEERS:
        loss, found = train(peers, steps)
        exact = exact or found
        share, cosine = compare(exact, peers)
        rows.append([str(peers), f"{share:.2f}", f"{cosine:.3f}", f"{loss:.3f}"])
    head = ["peers", "largest part of A left out", "smallest cosine", "loss"]
    say(markdown_table(head, rows))


if __name__ == "__main__":
    main()
