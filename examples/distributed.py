"""Several processes: torchrun --nproc-per-node 2 examples/distributed.py [--kfac]

SPNGD reduces gradients itself, so the model is not wrapped; KFAC runs under DDP.
"""

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1).to(device) / 16
    y = torch.tensor(digits.target).to(device)
    model = network().to(device)
    if "--kfac" in sys.argv:
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        often = natgrad.Every(statistics=1, inverses=10)  # the run is short
        natural = natgrad.KFAC(model, optimizer, damping=1e-2, refresh=often)
    else:
        optimizer = natural = natgrad.SPNGD(model, lr=0.05, damping=1e-2)
    for epoch in range(6):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(128):
            mine = batch[rank::world]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
    model.eval()
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    if rank == 0:
        moved = natural.traffic()["total"]["reduce_statistics"]["sent"]
        print(f"test accuracy {accuracy:.1%}, {moved / 2**20:.2f} MiB of statistics")
    natural.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
