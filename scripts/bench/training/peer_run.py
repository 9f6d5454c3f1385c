"""One rank of gpu_peers.py: pretrain_gpt of a Megatron-LM checkout, or this plugin's (-), on given documents.

torchrun --nproc-per-node 2 -m scripts.bench.training.peer_run CHECKOUT|- <Megatron's flags>

Megatron's datasets of conversations get a stand-in below them that reads the documents of --data-path: --sft packs of
whole documents, --use-varlen-dataset one document each. All that follows is the checkout's own code. A last line tells
the rank's peak memory. Without flags it only imports what a run needs.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

IGNORED = -100
"""Label of what no token predicts, as Megatron's dataset of conversations has it."""


class Documents:
    """One document an item, in the order of PREFIX.order.npy."""

    def __init__(self, prefix: str) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._index = IndexedDataset(prefix)
        self._packs: Sequence[Any] = np.load(f"{prefix}.order.npy")[:, None]

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, item: int) -> list[dict[str, Any]]:
        """A conversation begins where the role is system."""
        return [{"role": "system", "content": self._index[int(number)]} for number in self._packs[item]]


class Packs(Documents):
    """One pack an item: the documents of PREFIX.order.npy whose number in PREFIX.packs.npy is the item's."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        numbers = np.load(f"{prefix}.packs.npy")
        self._packs = np.split(self._packs[:, 0], np.flatnonzero(np.diff(numbers)) + 1)


def tokens_and_targets(_: Any, conversation: list[dict[str, Any]], **__: Any) -> tuple[Any, Any]:
    """For tokenize_conversation: a document's tokens, the first of which none predicts."""
    tokens = conversation[0]["content"].astype(np.int64)
    return tokens, np.concatenate([[IGNORED], tokens[1:]])


def import_checkout(checkout: Path) -> None:
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    for name in ("megatron.training", "gpt_builders", "model_provider"):
        path = importlib.import_module(name).__file__
        if path is None or checkout not in Path(path).parents:
            raise SystemExit(f"{name} is imported from {path}, not from {checkout}")


def run_checkout(checkout: Path) -> None:
    from megatron.core.datasets import utils
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
    from megatron.training.datasets import sft_dataset, varlen_dataset

    utils.compile_helpers = lambda: None  # of datasets that are not used here
    sft: Any = sft_dataset.SFTDataset
    varlen: Any = varlen_dataset.VarlenDataset
    sft.build_low_level_dataset = staticmethod(lambda path, config: Packs(path))
    varlen.build_low_level_dataset = staticmethod(lambda path, config: Documents(path))
    tokenizer: Any = MegatronTokenizerText
    tokenizer.tokenize_conversation = tokens_and_targets
    runpy.run_path(str(checkout / "pretrain_gpt.py"), run_name="__main__")


def main() -> None:
    checkout, *arguments = sys.argv[1:]
    if checkout == "-":
        from wlb_megatron.plugin import pretrain_gpt
    else:
        import_checkout(Path(checkout).resolve())
    if not arguments:
        return
    sys.argv = ["pretrain_gpt.py", *arguments]
    import torch

    cuda = torch.cuda.is_available()
    held = torch.cuda.memory_allocated() if cuda else 0
    try:
        if checkout == "-":
            pretrain_gpt.main()
        else:
            run_checkout(Path(checkout).resolve())
    finally:
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        memory = f"peak MB: {peak / 1e6:.0f}, held before: {held / 1e6:.0f}"
        print(f"[peer] rank {os.environ.get('RANK', '0')} {memory}", flush=True)


if __name__ == "__main__":
    main()
