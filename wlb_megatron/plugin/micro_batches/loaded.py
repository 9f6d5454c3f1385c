"""What a rank holds of a micro-batch: the value that travels from the data loader to the loss."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from wlb_megatron.plan import PADDING
from wlb_megatron.plugin.micro_batches.planning import PlannedMicroBatch, RankGroup
from wlb_megatron.sharding.attention_calls import AttentionLayout, attention_layout
from wlb_megatron.sharding.segments import ShardPlan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Layout:
    """What of a micro-batch this process holds, and whether it needs its tokens.

    window: earlier keys that a query of the model's windowed layers sees, None if it has no such layers.
    stage_rank, cp_size: among the stage's data x context parallel ranks, and of Megatron's groups of them.
    routes: the model has experts, whose routers must not count padding. follows: how many further tokens it predicts,
    each of which asks for the next one of a document. vocabulary: rows of the embedding, which token ids must be below.
    by_document: its routers balance each document by itself. gathers: it has gated delta nets, which take all tokens of
    a micro-batch for some of their heads.
    """

    cp_rank: int
    activation_divisor: int
    hidden_size: int
    reads_tokens: bool
    window: int | None = None
    stage_rank: int = 0
    cp_size: int = 1
    routes: bool = False
    follows: int = 0
    vocabulary: int | None = None
    by_document: bool = False
    gathers: bool = False

    def within(self, group: RankGroup | None) -> Layout:
        """The same where another group than Megatron's context-parallel one shares the micro-batch."""
        return self if group is None else replace(self, cp_rank=self.stage_rank - group.start)


class Pinned:
    """torch's data loader calls pin_memory; it does not look into a dataclass by itself."""

    __slots__ = ()

    def pin_memory(self) -> Self:
        """The same with all its tensors in pinned memory, so that copies to the GPU need not wait."""
        parts: Any = self
        values = {field.name: getattr(parts, field.name) for field in fields(parts)}
        pinned = {name: value.pin_memory() for name, value in values.items() if hasattr(value, "pin_memory")}
        return replace(parts, **pinned)


@dataclass(frozen=True, slots=True)
class HeldTokens(Pinned):
    """The t tokens that this rank embeds or scores, in the order in which it holds them.

    tokens, labels, position_ids: int64[1 + follows, t]. loss_mask: float32[1 + follows, t]. Row k is what is k tokens
    later in the same document, 0 beyond its end: for multi-token prediction. The mask is 1 where a token predicts its
    label, and in row k the factor of that depth's losses. predicted: the sum of the mask's row 0.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    predicted: float


@dataclass(frozen=True, slots=True)
class DocumentRows(Pinned):
    """How all tokens of a micro-batch, rank by rank, are put in its documents' order; for gated delta nets.

    Args:
        starts: int32[n + 1], the first token of each of n pieces, padding included, and the end of the last.
        starts_on_host: The same, where starts is on a GPU.
        gathered: int32[T], the place in that order of each token, rank by rank. None if one rank has them all, whose
            order is the documents'. Example: ranks with tokens 0 1 5 and 2 3 4 give 0 1 5 2 3 4.
        order: int32[T], the inverse: 0 1 3 4 5 2.
    """

    starts: torch.Tensor
    starts_on_host: torch.Tensor
    gathered: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @classmethod
    def of(cls, plan: ShardPlan) -> DocumentRows:
        """Those of a micro-batch's plan. Chunks of documents have none."""
        if plan.cp_size == 1:
            ends = np.cumsum(plan.lengths[plan.ranks[0][:, 0]])
            starts = torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
            return cls(starts, starts)
        gathered = np.concatenate([plan.packed_index(rank) for rank in range(plan.cp_size)]).astype(np.int32)
        order = np.empty_like(gathered)
        order[gathered] = np.arange(len(gathered), dtype=np.int32)
        starts = torch.from_numpy(plan.piece_starts.astype(np.int32))
        return cls(starts, starts, torch.from_numpy(gathered), torch.from_numpy(order))

    def cuda(self) -> DocumentRows:
        """The same on the current GPU, the starts there and on the host."""
        moved = {
            name: value.cuda(non_blocking=True)
            for name in ("starts", "gathered", "order")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class LoadedMicroBatch(Pinned):
    """One micro-batch on this rank. It holds t of the micro-batch's T tokens.

    layout: the rank's, within the group that shares the micro-batch. attention: the rank's attention calls. bounds:
    int64[n + 1], cumulative lengths of the n real documents that end here; one in chunks counts whole, with its last
    chunk. held: None on a pipeline stage that neither embeds nor scores. padding_mask: bool[1, t], True if a token is
    padding; for routers alone. document_of: int64[t], index of each token's piece; for routers that balance each
    document. documents: for gated delta nets.
    """

    planned: PlannedMicroBatch
    layout: Layout
    attention: AttentionLayout
    bounds: torch.Tensor
    held: HeldTokens | None = None
    padding_mask: torch.Tensor | None = None
    document_of: torch.Tensor | None = None
    documents: DocumentRows | None = None

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        """Shape of the hidden states that pipeline stages hand on: [tokens held, 1, hidden]."""
        tokens = self.planned.shard.tokens_per_rank[self.layout.cp_rank]
        return tokens // self.layout.activation_divisor, 1, self.layout.hidden_size


def share(parts: DataclassInstance) -> None:
    """Move all its tensors to shared memory, in which a loader's worker hands them over."""
    for field in fields(parts):
        value = getattr(parts, field.name)
        if isinstance(value, torch.Tensor):
            value.share_memory_()
        elif isinstance(value, HeldTokens | DocumentRows):
            share(value)


def from_plan(micro_batch: PlannedMicroBatch, layout: Layout) -> LoadedMicroBatch:
    """All that is made from the plan alone; `held` is left out."""
    layout, real = layout.within(micro_batch.group), _whole_lengths(micro_batch)
    if micro_batch.group is not None:
        # Megatron sums over all ranks and divides by the context-parallel size: one rank reports, so many times.
        real = np.tile(real, layout.cp_size) if layout.cp_rank == 0 and len(real) else np.zeros(1, np.int64)
    padding = document_of = None
    if layout.routes:
        padding = torch.from_numpy(padding_mask(micro_batch, layout.cp_rank))[None]
    if layout.by_document:
        rows = micro_batch.shard.ranks[layout.cp_rank]
        document_of = torch.from_numpy(np.repeat(rows[:, 0], rows[:, 2] - rows[:, 1]).astype(np.int64))
    return LoadedMicroBatch(
        micro_batch,
        layout,
        attention_layout(micro_batch.shard, layout.cp_rank, layout.window),
        torch.from_numpy(np.concatenate(([0], np.cumsum(real))).astype(np.int64)),
        padding_mask=padding,
        document_of=document_of,
        documents=DocumentRows.of(micro_batch.shard) if layout.gathers else None,
    )


def _whole_lengths(micro_batch: PlannedMicroBatch) -> np.ndarray:
    """int64[n]: tokens of the documents that end here, those of earlier chunks included; padding left out.

    Counted so, a step's tokens and squared lengths are the documents', in however many chunks they came.
    """
    lengths = micro_batch.shard.prefixes + micro_batch.shard.lengths
    last = len(lengths) - (micro_batch.pieces[-1].document == PADDING)
    ends = np.ones(last, dtype=bool)
    if micro_batch.shard.chunks is not None:
        ends[micro_batch.shard.chunks.continued] = False
    return lengths[:last][ends]


def padding_mask(micro_batch: PlannedMicroBatch, rank: int) -> np.ndarray:
    """bool[t]: which of the tokens that the rank holds are padding, in the order it holds them."""
    last = micro_batch.pieces[-1].document == PADDING
    rows = micro_batch.shard.ranks[rank]
    return np.repeat(last & (rows[:, 0] == len(micro_batch.pieces) - 1), rows[:, 2] - rows[:, 1])
