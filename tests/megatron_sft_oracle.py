"""A run without the plugin: each conversation alone, a micro-batch of its own, by Megatron's own SFT tokenizer.

ORACLE_JSONL: of one conversation a line. ORACLE_DOCUMENTS: the lines that one step trains. Losses and gradients as
megatron_worker.py saves them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from megatron.core.tokenizers.text.libraries.sft_tokenizer import IGNORE_INDEX, SFTTokenizer
from megatron.training import get_args
from megatron_stock import train
from megatron_worker import seen


class Conversations(torch.utils.data.Dataset):
    """One conversation an item, as SFTDataset shifts it: labels are the targets from the second token on."""

    def __init__(self) -> None:
        args = get_args()
        self._tokenizer = SFTTokenizer(args.tokenizer_model, args.sft_tokenizer_prompt_format)
        lines = Path(os.environ["ORACLE_JSONL"]).read_text(encoding="utf-8").splitlines()
        self._messages = [
            json.loads(lines[n])["messages"] for n in json.loads(os.environ["ORACLE_DOCUMENTS"])
        ]

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, targets = self._tokenizer.tokenize_conversation(self._messages[index], True, False)
        return {
            "tokens": torch.from_numpy(tokens[:-1]).long(),
            "labels": torch.from_numpy(targets[1:]).long(),
        }


def provider(samples: Any, vp_stage: int | None = None) -> Any:
    return Conversations(), None, None


def forward_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    positions = torch.arange(batch["tokens"].shape[1])[None]
    mask = (batch["labels"] != IGNORE_INDEX).float()
    labels = batch["labels"].clamp(min=0)

    def loss(output: torch.Tensor) -> Any:
        total, count = (output.float() * mask).sum(), mask.sum().int()
        seen["losses"].append((float(total.detach()), int(count)))
        return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}

    return model(batch["tokens"], positions, None, labels=labels, loss_mask=mask), loss


if __name__ == "__main__":
    del __file__  # else the process that collects what checkpoint writers say imports all this again
    train(provider, forward_step)
