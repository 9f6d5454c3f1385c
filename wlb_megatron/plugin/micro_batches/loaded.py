"""What a rank holds of a micro-batch, the value that travels from the data loader to the loss, and the process group of
the ranks that share it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from wlb_megatron.documents.blend import Blend
from wlb_megatron.dynamic.plan import block_sizes
from wlb_megatron.errors import WlbError
from wlb_megatron.plan import PADDING
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.micro_batches.planning import PlannedMicroBatch, RankGroup
from wlb_megatron.sharding.attention_calls import AttentionLayout, attention_layout
from wlb_megatron.sharding.segments import ShardPlan


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


class HeldTokens(NamedTuple):
    """The t tokens that this rank embeds or scores, in the order in which it holds them. torch's data loader pins the
    tensors of a tuple; it does not look into a dataclass.

    tokens, labels, position_ids: int64[1 + follows, t]. loss_mask: float32[1 + follows, t]. Row k is what is k tokens
    later in the same document, 0 beyond its end: for multi-token prediction. The mask is 1 where a token predicts its
    label, and in row k the factor of that depth's losses. predicted: the sum of the mask's row 0.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    predicted: float


class DocumentRows(NamedTuple):
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
        return self._replace(**moved)


class LoadedMicroBatch(NamedTuple):
    """One micro-batch on this rank. It holds t of the micro-batch's T tokens.

    layout: the rank's, within the group that shares the micro-batch. attention: the rank's attention calls. held: None
    on a pipeline stage that neither embeds nor scores. padding_mask: bool[1, t], True if a token is padding; for
    routers alone. document_of: int64[t], index of each token's piece; for routers that balance each document.
    documents: for gated delta nets.
    """

    planned: PlannedMicroBatch
    layout: Layout
    attention: AttentionLayout
    held: HeldTokens | None = None
    padding_mask: torch.Tensor | None = None
    document_of: torch.Tensor | None = None
    documents: DocumentRows | None = None

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        """Shape of the hidden states that pipeline stages hand on: [tokens held, 1, hidden]."""
        tokens = self.planned.shard.tokens_per_rank[self.layout.cp_rank]
        return tokens // self.layout.activation_divisor, 1, self.layout.hidden_size

    def document_lengths(self) -> np.ndarray:
        """int64[n]: tokens of the documents that end here, those of earlier chunks included; padding left out.

        Counted so, a step's tokens and squared lengths are the documents', in however many chunks they came.
        """
        plan = self.planned.shard
        ends = np.ones(len(plan.lengths), dtype=bool)
        ends[len(ends) - (self.planned.pieces[-1].document == PADDING) :] = False
        if plan.chunks is not None:
            ends[plan.chunks.continued] = False
        lengths: np.ndarray = (plan.prefixes + plan.lengths)[ends]
        if self.planned.group is None:
            return lengths
        # Megatron sums over all ranks and divides by the context-parallel size: one rank reports, so many times.
        return np.tile(lengths, self.layout.cp_size if self.layout.cp_rank == 0 else 0)


def from_plan(micro_batch: PlannedMicroBatch, layout: Layout) -> LoadedMicroBatch:
    """All that is made from the plan alone; `held` is left out."""
    if micro_batch.group is not None:
        layout = replace(layout, cp_rank=layout.stage_rank - micro_batch.group.start)
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
        padding_mask=padding,
        document_of=document_of,
        documents=DocumentRows.of(micro_batch.shard) if layout.gathers else None,
    )


def padding_mask(micro_batch: PlannedMicroBatch, rank: int) -> np.ndarray:
    """bool[t]: which of the tokens that the rank holds are padding, in the order it holds them."""
    last = micro_batch.pieces[-1].document == PADDING
    rows = micro_batch.shard.ranks[rank]
    return np.repeat(last & (rows[:, 0] == len(micro_batch.pieces) - 1), rows[:, 2] - rows[:, 1])


class PackedDocuments(Dataset[LoadedMicroBatch]):
    """Tokens of a corpus by micro-batch plan: `self[planned]` is what this rank holds of it.

    A middle pipeline stage reads no tokens. All of it is made here, in a worker, not in a step. WlbError for a token id
    without a row in the embedding.
    """

    def __init__(self, corpus: Blend, layout: Layout) -> None:
        self._corpus = corpus
        self.layout = layout

    def __getitem__(self, micro_batch: PlannedMicroBatch) -> LoadedMicroBatch:
        loaded_batch = from_plan(micro_batch, self.layout)
        if not self.layout.reads_tokens:
            return loaded_batch
        return loaded_batch._replace(held=self._read(micro_batch, loaded_batch.layout.cp_rank))

    def _read(self, micro_batch: PlannedMicroBatch, rank: int) -> HeldTokens:
        plan, rows = micro_batch.shard, 1 + self.layout.follows
        size = plan.tokens_per_rank[rank]
        tokens, labels, positions = (np.zeros((rows, size), dtype=np.int64) for _ in range(3))
        mask = np.zeros((rows, size), dtype=np.float32)
        positions[0] = plan.positions(rank)
        ends = plan.prefixes + plan.lengths + plan.rests
        offset = 0
        for index, start, end in plan.ranks[rank].tolist():
            piece = micro_batch.pieces[index]
            if piece.document != PADDING:
                # One token more than held, for the last label. A document's last token predicts nothing; the
                # last token of a piece cut off earlier still predicts the token that really follows it, so does a
                # chunk's. Further rows go on into the next chunks, but not beyond the last one. Of a document of 7
                # tokens the chunk [3, 6) has the rows 3 4 5, 4 5 6, 5 6 0.
                first, document_end = piece.start - piece.prefix + start, int(ends[index])
                last = first + min(end + rows - 1, document_end) - start + 1
                last = min(last, self._corpus.length(piece.document))
                read = self._corpus.read(piece.document, first, last)
                self._check_ids(piece.document, first, read)
                targets = self._corpus.targets(piece.document, first + 1, last)
                for row in range(rows):
                    length = max(0, min(end + row, document_end) - start - row)
                    tokens[row, offset : offset + length] = read[row : row + length]
                    positions[row, offset : offset + length] = np.arange(start + row, start + row + length)
                    predictions = max(0, min(length, len(read) - 1 - row))
                    labels[row, offset : offset + predictions] = read[row + 1 : row + 1 + predictions]
                    mask[row, offset : offset + predictions] = targets[row : row + predictions]
            offset += end - start
        for row, count in enumerate(micro_batch.predictions[1:], 1):  # see multi_token.py
            mask[row] *= micro_batch.predictions[0] / count if count else 0.0
        return HeldTokens(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy(mask),
            position_ids=torch.from_numpy(positions),
            predicted=float(mask[0].sum()),
        )

    def _check_ids(self, document: int, first: int, read: np.ndarray) -> None:
        """WlbError if a token id has no row in the embedding: tensor-parallel ranks would take it for one of another
        rank's, and train on zeros."""
        rows = self.layout.vocabulary
        if rows is None or (read.min() >= 0 and read.max() < rows):
            return
        index = int(((read < 0) | (read >= rows)).argmax())
        raise WlbError(
            f"{self._corpus.name(document)} has token id {read[index]} at token {first + index}, but the vocabulary "
            f"ends at {rows - 1}: tokenize the corpus with this run's tokenizer, or correct --vocab-size"
        )


@dataclass(slots=True)
class RankGroups:
    """by_size: this rank's process groups. It holds at most MOST_GROUPS, two of which are Megatron's own: its
    context-parallel group and that of all data x context parallel ranks."""

    by_size: dict[int, Any] = field(default_factory=dict)


def process_group(group: RankGroup | None) -> Any:
    """The process group of a planned micro-batch; None for Megatron's own, and for a rank alone."""
    return None if group is None or group.size == 1 else part(RankGroups).by_size[group.size]


def make_groups(timeout: timedelta) -> None:
    """Make this rank's groups of all sizes. Called on every rank, before training.

    A rank is in one block of each size. Blocks are nested and made from the smallest to the largest: a rank never waits
    in a block's creation for one that waits in a smaller one. Each is used once before training: no communicator is set
    up in the midst of a step, and none takes GPU memory after the rehearsal, which has shown that the longest
    micro-batches fit beside them.

    timeout: their collectives' time limit, the same as that of Megatron's own groups (--distributed-timeout-minutes).
    """
    from megatron.core import parallel_state

    stage = parallel_state.get_data_parallel_group(with_context_parallel=True)
    context = parallel_state.get_context_parallel_group()
    ranks = dist.get_process_group_ranks(stage)
    here, width = ranks.index(dist.get_rank()), dist.get_world_size(context)
    block, groups = here // width * width, part(RankGroups).by_size
    if dist.get_process_group_ranks(context) != ranks[block : block + width]:
        raise RuntimeError(
            f"wlb_megatron: context-parallel ranks {dist.get_process_group_ranks(context)} do not lie side by side "
            f"among the data x context parallel ranks {ranks}: dynamic groups need Megatron's default --order"
        )
    for size in block_sizes(width, len(ranks) // width)[1:]:
        start = here // size * size
        if size == width:
            group = context
        elif size == len(ranks):
            group = stage
        else:
            members = ranks[start : start + size]
            # Megatron's own way: the group is among those whose time limit it lowers once training runs.
            group = parallel_state.create_group(members, timeout=timeout, use_local_synchronization=True)
        dist.all_reduce(torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu"), group=group)
        groups[size] = group
