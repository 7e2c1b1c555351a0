"""Gradient accumulation with no_sync: torchrun --nproc-per-node 2 accumulation.py

The loss of each micro-batch is divided by their number, which natgrad expects; sums
that are not divided need the option ``accumulation="sum"``.
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad

MICRO_BATCHES = 4


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32)[order].to(device) / 16
    y = torch.tensor(labels)[order].to(device)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = natgrad.KFAC(model, optimizer, damping=0.1)
    for _ in range(8):
        for batch in torch.randperm(1500).split(128):
            optimizer.zero_grad()
            parts = batch[rank::world].tensor_split(MICRO_BATCHES)
            for i, rows in enumerate(parts):
                last = i == MICRO_BATCHES - 1
                with nullcontext() if last else model.no_sync():
                    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                    (loss / MICRO_BATCHES).backward()
            optimizer.step()
    with torch.no_grad():
        right = model(x[1500:]).argmax(1) == y[1500:]
    if rank == 0:
        print(f"test accuracy {right.float().mean():.1%}")
    kfac.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
