"""Parameter groups, clip_grad_norm_, an LR schedule and an EMA of the weights.

Each stays where it always is. Clipping sees the gradient before it is preconditioned;
weight decay and momentum are the optimizer's, and see it afterwards.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import natgrad

EPOCHS, BATCH = 8, 125


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.05},
    ]
    groups[0]["weight_decay"] = 1e-4
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    kfac = natgrad.KFAC(model, optimizer, damping=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.2, 0.1], total_steps=EPOCHS * (1500 // BATCH)
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    for _ in range(EPOCHS):
        for rows in torch.randperm(1500).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
    print(kfac)
    for name, net in (("last weights", model), ("averaged weights", average)):
        with torch.no_grad():
            right = net(x[1500:]).argmax(1) == y[1500:]
        print(f"test accuracy of the {name} {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
