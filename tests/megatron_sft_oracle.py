"""A run without the plugin: each conversation alone, a micro-batch of its own, by Megatron's own SFT tokenizer.

ORACLE_JSONL: of one conversation a line. ORACLE_DOCUMENTS: the lines that one step trains. Losses and gradients as
megatron_worker.py saves them. Losses of multi-token prediction count as many times as in a step of all conversations:
Megatron counts, at each depth, those of a micro-batch alone.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from megatron.core.tokenizers.text.libraries.sft_tokenizer import IGNORE_INDEX, SFTTokenizer
from megatron.core.transformer import multi_token_prediction
from megatron.training import get_args
from megatron_stock import train
from megatron_worker import seen

depths: list[int] = []
"""Targets of all conversations that are predicted 1, 2, .. tokens ahead."""
rolled: list[torch.Tensor] = []
"""Of this micro-batch: how many it has of them one token ahead, a time for each depth begun."""


def roll_for_the_step(roll: Any) -> Any:
    """roll_tensor that tells of a mask the number of targets by which Megatron's ratio is that of the step."""

    def roll_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        later, count = roll(tensor, *args, **kwargs)
        if tensor.is_floating_point():
            rolled.append(rolled[0] if rolled else tensor.sum())
            count = rolled[0] * depths[len(rolled)] / depths[0]
        return later, count

    return roll_tensor


class Conversations(torch.utils.data.Dataset):
    """One conversation an item, as SFTDataset shifts it: labels are the targets from the second token on."""

    def __init__(self) -> None:
        args = get_args()
        self._tokenizer = SFTTokenizer(args.tokenizer_model, args.sft_tokenizer_prompt_format)
        lines = Path(os.environ["ORACLE_JSONL"]).read_text(encoding="utf-8").splitlines()
        self._messages = [
            json.loads(lines[n])["messages"] for n in json.loads(os.environ["ORACLE_DOCUMENTS"])
        ]

        for depth in range((args.mtp_num_layers or 0) + 1):
            targets = [self[n]["labels"][depth:] for n in range(len(self))]
            depths.append(sum(int((each != IGNORE_INDEX).sum()) for each in targets))
        multi_token_prediction.roll_tensor = roll_for_the_step(multi_token_prediction.roll_tensor)

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
    rolled.clear()

    def loss(output: torch.Tensor) -> Any:
        total, count = (output.float() * mask).sum(), mask.sum().int()
        seen["losses"].append((float(total.detach()), int(count)))
        return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}

    return model(batch["tokens"], positions, None, labels=labels, loss_mask=mask), loss


if __name__ == "__main__":
    del __file__  # else the process that collects what checkpoint writers say imports all this again
    train(provider, forward_step)
