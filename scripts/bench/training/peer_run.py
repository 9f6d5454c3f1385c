"""One rank of gpu_peers.py: pretrain_gpt of a Megatron-LM checkout, or this plugin's (-), on given documents.

torchrun --nproc-per-node 2 -m scripts.bench.training.peer_run CHECKOUT|- <Megatron's flags>

Megatron's datasets of conversations get a stand-in below them that reads the documents of --data-path: --sft packs of
whole documents, --use-varlen-dataset one document each. Where PREFIX.mask is there, its ones are the trained tokens.
All that follows is the checkout's own code. A last line tells the rank's peak memory, and the tokens that its model
computed, with padding. Without flags it only imports what a run needs.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
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
        lengths = self._index.sequence_lengths
        self._begins = np.cumsum(lengths) - lengths
        masks = Path(f"{prefix}.mask")
        self._mask = np.memmap(masks, dtype=np.uint8, mode="r") if masks.exists() else None
        self._packs: Any = np.load(f"{prefix}.order.npy")[:, None]

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, item: int) -> list[dict[str, Any]]:
        """A conversation begins where the role is system. content: tokens and targets."""
        return [{"role": "system", "content": self._targets(int(number))} for number in self._packs[item]]

    def _targets(self, number: int) -> tuple[Any, Any]:
        """A document's tokens, the first of which none predicts."""
        tokens = self._index[number].astype(np.int64)
        targets = np.concatenate([[IGNORED], tokens[1:]])
        if self._mask is not None:
            begin = int(self._begins[number])
            targets[self._mask[begin : begin + len(tokens)] == 0] = IGNORED
        return tokens, targets


class Packs(Documents):
    """One pack an item: the documents of PREFIX.order.npy whose number in PREFIX.packs.npy is the item's."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        numbers = np.load(f"{prefix}.packs.npy")
        self._packs = np.split(self._packs[:, 0], np.flatnonzero(np.diff(numbers)) + 1)


def tokens_and_targets(_: Any, conversation: list[dict[str, Any]], **__: Any) -> tuple[Any, Any]:
    """For tokenize_conversation."""
    tokens, targets = conversation[0]["content"]
    return tokens, targets


computed = 0
"""Tokens that the model of this rank has computed, with padding."""


def count_computed() -> None:
    from megatron.core.models.gpt import GPTModel

    model: Any = GPTModel
    usual = model.forward
    if hasattr(usual, "counts"):  # by an earlier run of this process
        return

    def forward(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        global computed
        computed += input_ids.numel()
        return usual(self, input_ids, *args, **kwargs)

    forward.counts = True  # type: ignore[attr-defined]
    model.forward = forward


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
    global computed
    checkout, *arguments = sys.argv[1:]
    if checkout == "-":
        from wlb_megatron.plugin import pretrain_gpt
    else:
        import_checkout(Path(checkout).resolve())
    if not arguments:
        return
    sys.argv = ["pretrain_gpt.py", *arguments]
    import torch

    count_computed()
    computed = 0
    cuda = torch.cuda.is_available()
    held = torch.cuda.memory_allocated() if cuda else 0
    try:
        if checkout == "-":
            pretrain_gpt.main()
        else:
            run_checkout(Path(checkout).resolve())
    finally:
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        memory = f"peak MB: {peak / 1e6:.0f}, held before: {held / 1e6:.0f}, computed: {computed}"
        print(f"[peer] rank {os.environ.get('RANK', '0')} {memory}", flush=True)


if __name__ == "__main__":
    main()
