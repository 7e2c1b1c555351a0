"""KFAC with Hugging Face Accelerate: one line before ``accelerator.prepare``."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import natgrad


def main() -> None:
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    train = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=48, gamma=0.3)
    natgrad.KFAC(model, optimizer, damping=0.1)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, train, schedule = accelerator.prepare(
        model, optimizer, train, schedule
    )
    for _ in range(8):
        for inputs, targets in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    with torch.no_grad():
        right = model(x[1500:].to(accelerator.device)).argmax(1).cpu() == y[1500:]
    accelerator.print(f"test accuracy {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
