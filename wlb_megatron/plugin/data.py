"""Packing as Megatron sees it: a document dataset and a batch sampler whose every item is one micro-batch's plan.

The provider is `is_distributed`: every rank builds it, makes the same plan from document lengths, and reads only
the tokens it holds; a middle pipeline stage reads none. Workers only read tokens, planning stays in the main
process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from wlb_megatron.packing.blend import Blend
from wlb_megatron.packing.summary import PlanSummary, Summariser
from wlb_megatron.plan import PADDING, Piece
from wlb_megatron.sharding.alignment import padding
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard


@dataclass(frozen=True, slots=True)
class PlannedMicroBatch:
    """One item of the sampler. `pieces` and `shard` include the padding piece, if there is one."""

    iteration: int
    index: int
    pieces: tuple[Piece, ...]
    shard: ShardPlan
    summary: PlanSummary
    plan_seconds: float


@dataclass(frozen=True, slots=True)
class Layout:
    """Where this process stands: what of a micro-batch it holds, and whether it needs its tokens."""

    cp_size: int
    cp_rank: int
    dp_rank: int
    alignment: int
    activation_divisor: int
    hidden_size: int
    reads_tokens: bool


class MicroBatchSampler(Sampler[list[PlannedMicroBatch]]):
    """Plans iterations one after another and yields this data-parallel rank's micro-batches."""

    def __init__(self, planner: Any, sharding: str, layout: Layout) -> None:
        self._planner = planner
        self._sharding = sharding
        self._layout = layout
        self._summariser = Summariser()

    def __iter__(self) -> Iterator[list[PlannedMicroBatch]]:
        while True:
            start = time.perf_counter()
            plan = self._planner.next_iteration()
            if plan is None:
                return
            summary = self._summariser.summarise(plan)
            mine = [row[self._layout.dp_rank] for row in plan.micro_batches]
            padded = [pad(micro_batch.pieces, self._layout.alignment) for micro_batch in mine]
            shards = [self._shard(pieces) for pieces in padded]
            seconds = time.perf_counter() - start
            for index, (pieces, shard_plan) in enumerate(zip(padded, shards, strict=True)):
                yield [PlannedMicroBatch(plan.iteration, index, pieces, shard_plan, summary, seconds)]

    def _shard(self, pieces: tuple[Piece, ...]) -> ShardPlan:
        lengths = np.array([piece.end - piece.start for piece in pieces], dtype=np.int64)
        return shard(lengths, self._layout.cp_size, self._sharding)


def pad(pieces: tuple[Piece, ...], alignment: int) -> tuple[Piece, ...]:
    """The pieces with a padding piece appended where their tokens are no multiple of `alignment`."""
    missing = padding(sum(piece.end - piece.start for piece in pieces), alignment)
    return (*pieces, Piece(0, PADDING, 0, missing)) if missing else pieces


class PackedDocuments(Dataset[dict[str, Any]]):
    """Tokens of a corpus by micro-batch plan: `self[planned]` is what this rank holds of it.

    Keys: tokens, labels, position_ids (int64[1, t]), loss_mask (float32[1, t]), or none of them where no tokens
    are needed; `planned` is the plan itself.
    """

    def __init__(self, corpus: Blend, layout: Layout) -> None:
        self._corpus = corpus
        self.layout = layout

    def __getitem__(self, planned: PlannedMicroBatch) -> dict[str, Any]:
        batch: dict[str, Any] = {"planned": planned, "layout": self.layout}
        if not self.layout.reads_tokens:
            return batch
        plan = planned.shard
        size = plan.tokens_per_rank[self.layout.cp_rank]
        tokens = np.zeros(size, dtype=np.int64)
        labels = np.zeros(size, dtype=np.int64)
        mask = np.zeros(size, dtype=np.float32)
        at = 0
        for index, start, end in plan.ranks[self.layout.cp_rank].tolist():
            piece = planned.pieces[index]
            length = end - start
            if piece.document != PADDING:
                # One token more than held, for the last label. A document's last token predicts nothing; the
                # last token of a piece cut off earlier still predicts the token that really follows it.
                first = piece.start + start
                last = min(first + length + 1, self._corpus.length(piece.document))
                read = self._corpus.read(piece.document, first, last)
                tokens[at : at + length] = read[:length]
                predicted = len(read) - 1
                labels[at : at + predicted] = read[1:]
                mask[at : at + predicted] = 1.0
            at += length
        batch["tokens"] = torch.from_numpy(tokens)[None]
        batch["labels"] = torch.from_numpy(labels)[None]
        batch["loss_mask"] = torch.from_numpy(mask)[None]
        batch["position_ids"] = torch.from_numpy(plan.positions(self.layout.cp_rank))[None]
        return batch


class MicroBatchIterator:
    """The loader's iterator, marked as the plugin's (Megatron's external dataloader is used as it comes)."""

    def __init__(self, loader: DataLoader[dict[str, Any]]) -> None:
        self._iterator = iter(loader)

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._iterator)


def is_planned(data_iterator: Any) -> bool:
    """Whether Megatron's (replayable) iterator is over the plugin's micro-batches."""
    return isinstance(getattr(data_iterator, "iterable", data_iterator), MicroBatchIterator)


def activation_shape(batch: dict[str, Any]) -> tuple[int, int, int]:
    """Shape of the hidden states that pipeline stages hand on: [tokens held, 1, hidden]."""
    layout: Layout = batch["layout"]
    tokens = batch["planned"].shard.tokens_per_rank[layout.cp_rank]
    return tokens // layout.activation_divisor, 1, layout.hidden_size


def make_iterator(
    corpus: Blend,
    planner: Any,
    sharding: str,
    layout: Layout,
    *,
    workers: int,
    micro_batches: int,
    pin_memory: bool,
) -> MicroBatchIterator:
    """Loader over the plan; workers read at least one iteration ahead of the one that trains."""
    ahead = -(-2 * micro_batches // workers) if workers else None
    loader = DataLoader(
        PackedDocuments(corpus, layout),
        batch_sampler=MicroBatchSampler(planner, sharding, layout),
        num_workers=workers,
        prefetch_factor=ahead,
        collate_fn=_only,
        pin_memory=pin_memory,
        persistent_workers=bool(workers),
    )
    return MicroBatchIterator(loader)


def _only(items: list[dict[str, Any]]) -> dict[str, Any]:
    (item,) = items
    return item
