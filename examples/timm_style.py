"""A vision transformer in timm's style: groups by weight decay, optimizer by name."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import natgrad

DIM, HEADS = 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).movedim(1, 3)
        mixed = nn.functional.scaled_dot_product_attention(*qkv.unbind(1))
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, DIM, 2, 2)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(16, DIM))
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(DIM))
        self.head = nn.Linear(DIM, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.blocks(x).mean(1))


def main(name: str = "polar", lr: float = 0.03) -> None:
    order = torch.randperm(1797, generator=torch.manual_seed(0))
    pixels, labels = (torch.tensor(a)[order] for a in load_digits(return_X_y=True))
    x, model = pixels.float().view(-1, 1, 8, 8) / 16, ViT()
    groups = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for n, p in model.named_parameters():
        groups[p.ndim < 2 or n == "pos_embed"]["params"].append((n, p))
    optimizer = natgrad.create(name, model, groups, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
    for _ in range(150):
        rows = torch.randint(1500, (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), labels[rows]).backward()
        optimizer.step()
        schedule.step()
    right = (model(x[1500:]).argmax(1) == labels[1500:]).double()
    print(f"{name}: test accuracy {right.mean():.1%}")


if __name__ == "__main__":
    main()
