"""A loop as torchtitan has it: optimizer by name, micro-batches, state by parameter.

The loss is a sum over tokens divided by their number in the step: ``loss="tokens"``.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import LambdaLR

import natgrad

WORDS, TOKENS, STEPS = 17, 32 * 16, 60


class Trainer:
    def __init__(self, name: str, lr: float) -> None:
        self.model = nn.Sequential(nn.Embedding(WORDS, 32), nn.Linear(32, WORDS))
        self.optimizer = natgrad.create(name, self.model, lr=lr, loss="tokens")
        self.schedule = LambdaLR(self.optimizer, lambda t: 1 - t / STEPS)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "s": self.schedule.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        both = {f"{name}_state_dict": saved[name] for name in ("model", "optim")}
        set_state_dict(self.model, self.optimizer, **both)
        self.schedule.load_state_dict(saved["s"])

    def train_step(self, sentences: torch.Tensor) -> float:
        """Two micro-batches; returns the share of words that are predicted."""
        self.optimizer.zero_grad()
        right = 0.0
        for part in sentences.chunk(2):
            scores, words = self.model(part[:, :-1]).mT, part[:, 1:]
            loss = nn.functional.cross_entropy(scores, words, reduction="sum")
            (loss / TOKENS).backward()
            right += float((scores.argmax(1) == words).sum())
        self.optimizer.step()
        self.schedule.step()
        return right / TOKENS


def main() -> None:
    torch.manual_seed(0)
    powers = torch.tensor([3**i % WORDS for i in range(17)])
    trainer = Trainer("polar", lr=0.03)
    for step in range(STEPS):
        if step == STEPS // 2:
            last, trainer = trainer, Trainer("polar", lr=0.03)
            trainer.load_state_dict(last.state_dict())
        sentences = torch.randint(WORDS, (32, 1)) * powers % WORDS
        print(f"accuracy {trainer.train_step(sentences):.1%}")


if __name__ == "__main__":
    main()
