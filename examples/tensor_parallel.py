"""fully_shard x tensor parallelism on a 2 x 2 mesh, data on one axis, layers on the
other: torchrun --nproc-per-node 4 examples/tensor_parallel.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as tp

import natgrad

WORDS, WIDTH, STEPS = 17, 32, 60


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "layers"))
    torch.manual_seed(0)
    layers = Layer(), Layer()
    ends = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    model = nn.Sequential(ends[0], *layers, ends[1]).to(device)
    for layer in layers:
        styles = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
        tp.parallelize_module(layer, mesh["layers"], styles)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = natgrad.Polar(model, lr=0.03)
    # ranks that share layers see the same examples
    torch.manual_seed(mesh.get_local_rank("data"))
    for _ in range(STEPS):
        words = torch.randint(WORDS, (64,)).to(device)
        targets = (words * words + 3) % WORDS
        scores = model(words)
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores, targets).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"accuracy {(scores.argmax(1) == targets).float().mean():.1%}")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
