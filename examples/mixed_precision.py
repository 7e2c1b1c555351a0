"""KFAC with torch.amp: give it the GradScaler, so that it can undo the loss scale.

A step that the scaler skips because of an overflow leaves the statistics untouched.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import natgrad


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32)[order].to(device) / 16
    y = torch.tensor(labels)[order].to(device)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    kfac = natgrad.KFAC(model, optimizer, damping=0.1, grad_scaler=scaler)
    for _ in range(8):
        for rows in torch.randperm(1500, device=device).split(125):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    with torch.no_grad():
        right = model(x[1500:]).argmax(1) == y[1500:]
    print(f"loss scale {scaler.get_scale():g}, health {kfac.health()}")
    print(f"test accuracy {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
