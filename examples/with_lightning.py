"""KFAC in Lightning with automatic optimization: one line in configure_optimizers.

``self.trainer.model`` is the module as Lightning wraps it, so that the same line works
on one device and under its DDP strategy.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import natgrad


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        natgrad.KFAC(self.trainer.model, optimizer, damping=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.3)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    train = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=64, shuffle=True)
    test = DataLoader(TensorDataset(x[1500:], y[1500:]), batch_size=297)
    trainer = lightning.Trainer(
        max_epochs=8,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), train, test)
    print(f"test accuracy {trainer.callback_metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
