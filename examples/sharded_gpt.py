"""GPT under fully_shard: torchrun --nproc-per-node 2 examples/sharded_gpt.py"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import natgrad

WORDS, WIDTH, LENGTH, STEPS = 17, 32, 16, 80


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places
        past = nn.Transformer.generate_square_subsequent_mask(LENGTH, x.device)
        for block in self.blocks:
            x = block(x, past, is_causal=True)
        return self.head(x)


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = GPT().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = natgrad.Polar(model, lr=0.03, loss="tokens")
    powers = torch.tensor([3**i % WORDS for i in range(LENGTH + 1)])
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        sentences = (torch.randint(WORDS, (32, 1)) * powers % WORDS).to(device)
        scores, words = model(sentences[:, :-1]).mT, sentences[:, 1:]
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores, words).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"accuracy {(scores.argmax(1) == words).float().mean():.1%}")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
