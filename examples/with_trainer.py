"""KFAC in the Hugging Face Trainer: a small GPT-2, made from a configuration.

The text has a rule: each token is twice the one before plus one, modulo the vocabulary.
The layers of GPT-2 (transformers' Conv1D) are known to natgrad by name.
"""

from dataclasses import replace

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import natgrad

VOCABULARY, LENGTH = 23, 8


class Doubles(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = [index % VOCABULARY]
        while len(row) < LENGTH:
            row.append((2 * row[-1] + 1) % VOCABULARY)
        return {"input_ids": torch.tensor(row), "labels": torch.tensor(row)}


def main() -> None:
    torch.manual_seed(0)
    size = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    config = GPT2Config(vocab_size=VOCABULARY, **size, **ends)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = replace(natgrad.KFAC.defaults, skip=("transformer.wpe",))
    kfac = natgrad.KFAC(model, optimizer, damping=0.1, loss="tokens", options=options)
    arguments = TrainingArguments(
        output_dir="runs/trainer",
        max_steps=50,
        per_device_train_batch_size=32,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    data = Doubles()
    trainer = Trainer(
        model, arguments, train_dataset=data, optimizers=(optimizer, None)
    )
    trainer.train()
    print(kfac)
    tokens = torch.stack([data[i]["input_ids"] for i in range(VOCABULARY)])
    with torch.no_grad():
        guesses = model.eval()(tokens).logits.argmax(-1)
    right = guesses[:, :-1] == tokens[:, 1:]
    print(f"accuracy of the next token {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
