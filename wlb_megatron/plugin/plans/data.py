"""Packing as Megatron sees it: a document dataset, and a batch sampler with one micro-batch's plan an item.

The provider is `is_distributed`: every rank makes the same plan from document lengths and reads only the tokens
it holds; a middle pipeline stage reads none. Workers only read tokens, planning stays in the main process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from wlb_megatron.documents.blend import Blend
from wlb_megatron.errors import WlbError
from wlb_megatron.plan import PADDING
from wlb_megatron.plugin.micro_batches.iterators import SHARED_MEMORY_FULL
from wlb_megatron.plugin.micro_batches.loaded import HeldTokens, Layout, LoadedMicroBatch, from_plan, share
from wlb_megatron.plugin.micro_batches.planning import PlannedIteration, PlannedMicroBatch


class MicroBatchSampler(Sampler[list[PlannedMicroBatch]]):
    """Yields the micro-batches of planned iterations, one a batch; notes each iteration's state as it passes.

    see: called with each iteration before any of it is given out.
    """

    def __init__(
        self, iterations: Iterable[PlannedIteration], see: Callable[[PlannedIteration], None] = lambda _: None
    ) -> None:
        self._iterations = iterations
        self._see = see
        self.passed: dict[int, PlannedIteration] = {}

    def __iter__(self) -> Iterator[list[PlannedMicroBatch]]:
        for iteration in self._iterations:
            self._see(iteration)
            self.passed[iteration.micro_batches[0].iteration] = iteration
            for micro_batch in iteration.micro_batches:
                yield [micro_batch]


class PackedDocuments(Dataset[LoadedMicroBatch]):
    """Tokens of a corpus by micro-batch plan: `self[planned]` is what this rank holds of it.

    All of it is made here, in a worker, not in a step. WlbError for a token id without a row in the embedding.
    """

    def __init__(self, corpus: Blend, layout: Layout) -> None:
        self._corpus = corpus
        self.layout = layout

    def __getitem__(self, micro_batch: PlannedMicroBatch) -> LoadedMicroBatch:
        without_tokens = from_plan(micro_batch, self.layout)
        return (
            replace(without_tokens, held=self._read(micro_batch, without_tokens.layout.cp_rank))
            if self.layout.reads_tokens
            else without_tokens
        )

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
                last = min(
                    first + min(end + rows - 1, document_end) - start + 1, self._corpus.length(piece.document)
                )
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


def read_ahead(windows: int, iteration_micro_batches: int) -> int:
    """Micro-batches that workers read ahead: two iterations of one a window, or one of the most that an iteration may
    be planned with, if those are more."""
    return max(2 * windows, iteration_micro_batches)


def files_of_workers(windows: int, iteration_micro_batches: int) -> int:
    """Files that a process has open at most for what a loader's workers hand over: one a tensor, seven a micro-batch,
    of those read ahead, of the iteration drawn ahead, and of the one that trains."""
    return 7 * (read_ahead(windows, iteration_micro_batches) + 2 * iteration_micro_batches)


def make_loader(
    corpus: Blend,
    sampler: MicroBatchSampler,
    layout: Layout,
    *,
    workers: int,
    prefetched: int,
    pin_memory: bool,
    ignored_signal: int | None = None,
) -> DataLoader[LoadedMicroBatch]:
    """Loader over the plan; workers read about `prefetched` micro-batches before they are asked for.

    ignored_signal: the signal that a scheduler sends to all processes of a job before its end (--exit-signal-handler).
    The trainer saves and exits then; workers that died of it would take the trainer with them first.
    """
    return DataLoader(
        PackedDocuments(corpus, layout),
        batch_sampler=sampler,
        num_workers=workers,
        prefetch_factor=-(-prefetched // workers) if workers else None,
        collate_fn=_only,
        pin_memory=pin_memory,
        persistent_workers=bool(workers),
        worker_init_fn=None if ignored_signal is None else partial(_ignore, ignored_signal),
    )


def _ignore(number: int, worker: int) -> None:
    signal.signal(number, signal.SIG_IGN)


def _only(items: list[LoadedMicroBatch]) -> LoadedMicroBatch:
    """The one item of a batch. A worker shares its tensors here. Else its queue does so in a thread, which drops the
    micro-batch where memory is full, and the trainer waits for ever."""
    (item,) = items
    if get_worker_info() is not None:
        try:
            share(item)
        except RuntimeError as error:
            raise WlbError(f"{SHARED_MEMORY_FULL} ({str(error).splitlines()[0]})") from None
    return item
