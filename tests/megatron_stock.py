"""One rank of a run without the plugin, from the weights of megatron_worker.py: what its layout changes by itself.

With --wlb-off the plugin's hooks are installed, and do nothing.

Fixed windows of the corpus, one document each as Megatron sees it; losses and gradients as the worker saves them.
WORKER_ALONE: numbers of the documents that are trained instead, each alone in a micro-batch.
"""

import json
import os
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.datasets import utils as datasets
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.enums import ModelType
from megatron.training import argument_utils, arguments, get_args, pretrain
from megatron_worker import norms_for_sequence_parallelism, save_when_reduced, seen, with_known_weights

from wlb_megatron import enable
from wlb_megatron.plugin.step.forward_step import sum_of_losses
from wlb_megatron.plugin.take_over import wrap_compile_helpers


class Windows(torch.utils.data.Dataset):
    """The corpus's tokens end to end, again and again, cut every `size` tokens."""

    def __init__(self, prefix: str, size: int, count: int) -> None:
        index = IndexedDataset(prefix)
        tokens = np.concatenate([index[number] for number in range(len(index))])
        self._tokens = torch.from_numpy(np.resize(tokens, size * count + 1).astype(np.int64))
        self._size, self._count = size, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = index * self._size
        return {
            "tokens": self._tokens[first : first + self._size],
            "labels": self._tokens[first + 1 : first + self._size + 1],
        }


class Documents(torch.utils.data.Dataset):
    """Whole documents of the corpus; each predicts its tokens from the second one on."""

    def __init__(self, prefix: str, numbers: list[int]) -> None:
        index = IndexedDataset(prefix)
        self._documents = [torch.from_numpy(index[number].astype(np.int64)) for number in numbers]

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._documents[index]
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def provider(samples: Any, vp_stage: int | None = None) -> Any:
    args = get_args()
    if alone := os.environ.get("WORKER_ALONE"):
        return Documents(args.data_path[0], json.loads(alone)), None, None
    return Windows(args.data_path[0], args.seq_length, samples[0]), None, None


def forward_step(data_iterator: Any, model: Any) -> Any:
    batch = {name: values.cuda() for name, values in next(data_iterator).items()}
    positions = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)[None]
    mask = torch.ones_like(batch["tokens"], dtype=torch.float32)

    def loss(output: torch.Tensor) -> Any:
        result = sum_of_losses(mask, output)
        seen["losses"].append((float(result[0].detach()), int(result[1])))
        return result

    return model(batch["tokens"], positions, None, labels=batch["labels"]), loss


def train(provider: Any, forward_step: Any) -> None:
    """Megatron's own training from the known weights; what it saw is saved at the end."""
    save_when_reduced()
    norms_for_sequence_parallelism()
    datasets.compile_helpers = partial(wrap_compile_helpers, datasets.compile_helpers)
    args = arguments.parse_and_validate_args()
    hybrid = args.hybrid_layer_pattern is not None
    config = (argument_utils.hybrid_config_from_args if hybrid else argument_utils.gpt_config_from_args)(args)
    config.pre_wrap_hooks.append(with_known_weights)
    provider.is_distributed = True
    pretrain(
        argument_utils.pretrain_cfg_container_from_args(args, config),
        train_valid_test_dataset_provider=provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


if __name__ == "__main__":
    if "--wlb-off" in sys.argv:
        enable()
    del __file__  # else the process that collects what checkpoint writers say imports all this again
    train(provider, forward_step)
