"""Packing as Megatron sees it: a document dataset, and a batch sampler with one micro-batch's plan an item.

The provider is `is_distributed`: every rank makes the same plan from document lengths and reads only the tokens
it holds; a middle pipeline stage reads none. Workers only read tokens, planning stays in the main process.
"""

from __future__ import annotations

import atexit
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from wlb_megatron.documents.blend import Blend
from wlb_megatron.errors import WlbError
from wlb_megatron.plan import PADDING
from wlb_megatron.plugin.plans.planning import PlannedIteration, PlannedMicroBatch, RankGroup
from wlb_megatron.refusals import RefusedHere
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.following import following


@dataclass(frozen=True, slots=True)
class Layout:
    """What of a micro-batch this process holds, and whether it needs its tokens.

    window: earlier keys that a query of the model's windowed layers sees, None where it has no such layers.
    stage_rank, cp_size: among the stage's data x context parallel ranks, and of Megatron's groups of them.
    routes: the model has experts, whose routers must not count padding. follows: how many further tokens it predicts,
    each of which asks for the next one of a document. vocabulary: rows of the embedding, which token ids must be below.
    by_document: its routers balance each document by itself.
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

    def within(self, group: RankGroup | None) -> Layout:
        """The same where another group than Megatron's context-parallel one shares the micro-batch."""
        return self if group is None else replace(self, cp_rank=self.stage_rank - group.start)


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
        for planned in self._iterations:
            self._see(planned)
            self.passed[planned.micro_batches[0].iteration] = planned
            for micro_batch in planned.micro_batches:
                yield [micro_batch]


class PackedDocuments(Dataset[dict[str, Any]]):
    """Tokens of a corpus by micro-batch plan: `self[planned]` is what this rank holds of it.

    Keys: tokens, labels, position_ids (int64[1, t]), loss_mask (float32[1, t]), or none of them where no
    tokens are needed; `planned` is the plan itself, `attention` this rank's attention calls of it, `bounds` the
    real documents' cumulative lengths (int64[n + 1]; one in chunks counts whole, with its last). `padding_mask`
    (bool[1, t]) is there for routers alone, for multi-token prediction `following` (int32[T]), how many of the rank's
    tokens predict one (`predicted`), and the `factors` of its losses. All of it is made here, in a worker, not in a
    step.
    """

    def __init__(self, corpus: Blend, layout: Layout) -> None:
        self._corpus = corpus
        self.layout = layout

    def __getitem__(self, planned: PlannedMicroBatch) -> dict[str, Any]:
        batch = with_plan(planned, self.layout)
        rank = batch["layout"].cp_rank
        if not self.layout.reads_tokens:
            return batch
        plan = planned.shard
        size = plan.tokens_per_rank[rank]
        tokens = np.zeros(size, dtype=np.int64)
        labels = np.zeros(size, dtype=np.int64)
        mask = np.zeros(size, dtype=np.float32)
        at = 0
        for index, start, end in plan.ranks[rank].tolist():
            piece = planned.pieces[index]
            length = end - start
            if piece.document != PADDING:
                # One token more than held, for the last label. A document's last token predicts nothing; the
                # last token of a piece cut off earlier still predicts the token that really follows it, so does a
                # chunk's.
                first = piece.start - piece.prefix + start
                last = min(first + length + 1, self._corpus.length(piece.document))
                read = self._corpus.read(piece.document, first, last)
                self._check_ids(piece.document, first, read)
                tokens[at : at + length] = read[:length]
                predicted = len(read) - 1
                labels[at : at + predicted] = read[1:]
                mask[at : at + predicted] = 1.0
            at += length
        batch["tokens"] = torch.from_numpy(tokens)[None]
        batch["labels"] = torch.from_numpy(labels)[None]
        batch["loss_mask"] = torch.from_numpy(mask)[None]
        batch["position_ids"] = torch.from_numpy(plan.positions(rank))[None]
        batch["predicted"] = float(mask.sum())
        return batch

    def _check_ids(self, document: int, first: int, read: np.ndarray) -> None:
        """WlbError if a token id has no row in the embedding: tensor-parallel ranks would take it for one of another
        rank's, and train on zeros."""
        rows = self.layout.vocabulary
        if rows is None or (read.min() >= 0 and read.max() < rows):
            return
        at = int(((read < 0) | (read >= rows)).argmax())
        raise WlbError(
            f"{self._corpus.name(document)} has token id {read[at]} at token {first + at}, but the vocabulary ends at "
            f"{rows - 1}: tokenize the corpus with this run's tokenizer, or correct --vocab-size"
        )


def with_plan(planned: PlannedMicroBatch, layout: Layout) -> dict[str, Any]:
    """A batch's parts that are made from its plan alone."""
    layout, real = layout.within(planned.group), _whole_lengths(planned)
    if planned.group is not None:
        # Megatron sums over all ranks and divides by the context-parallel size: told by one rank, so many times.
        real = np.tile(real, layout.cp_size) if layout.cp_rank == 0 and len(real) else np.zeros(1, np.int64)
    batch = {
        "planned": planned,
        "layout": layout,
        "attention": attention_layout(planned.shard, layout.cp_rank, layout.window),
        "bounds": torch.from_numpy(np.concatenate(([0], np.cumsum(real))).astype(np.int64)),
    }
    if layout.routes:
        batch["padding_mask"] = torch.from_numpy(padding_mask(planned, layout.cp_rank))[None]
    if layout.by_document:
        rows = planned.shard.ranks[layout.cp_rank]
        batch["documents"] = torch.from_numpy(np.repeat(rows[:, 0], rows[:, 2] - rows[:, 1]).astype(np.int64))
    if layout.follows:
        batch["following"] = torch.from_numpy(following(planned.shard).astype(np.int32))
        first, *further = planned.predictions
        batch["factors"] = [first / count if count else 0.0 for count in further]
    return batch


def _whole_lengths(planned: PlannedMicroBatch) -> np.ndarray:
    """int64[n]: tokens of the documents that end here, those of earlier chunks included; padding left out.

    Counted so, a step's tokens and squared lengths are the documents', in however many chunks they came.
    """
    lengths = planned.shard.prefixes + planned.shard.lengths
    last = len(lengths) - (planned.pieces[-1].document == PADDING)
    ends = np.ones(last, dtype=bool)
    if planned.shard.chunks is not None:
        ends[planned.shard.chunks.continued] = False
    return lengths[:last][ends]


def padding_mask(planned: PlannedMicroBatch, rank: int) -> np.ndarray:
    """bool[t]: which of the tokens that the rank holds are padding, in the order it holds them."""
    last = planned.pieces[-1].document == PADDING
    rows = planned.shard.ranks[rank]
    return np.repeat(last & (rows[:, 0] == len(planned.pieces) - 1), rows[:, 2] - rows[:, 1])


class MicroBatchIterator:
    """The loader's iterator, marked as the plugin's (Megatron's external dataloader is used as it comes)."""

    def __init__(
        self,
        loader: DataLoader[dict[str, Any]],
        trained: Callable[[list[dict[str, Any]], bool], None] | None = None,
        rehearsal: list[dict[str, Any]] | None = None,
    ) -> None:
        """trained: called with the micro-batches of a step when it is done, and whether it was skipped. rehearsal: see
        rehearsal.py."""
        self._iterator: Iterator[dict[str, Any]] = iter(loader)
        self._trained = trained
        self._rehearsal = rehearsal
        self._began: float | None = None
        self._drawn: deque[dict[str, Any] | Exception] = deque()
        # Workers that ignore a signal are not ended by it when Python exits: end them before it tries.
        atexit.register(self.close)

    def close(self) -> None:
        """End the workers. The traceback of an error that they raised keeps the loader's iterator, so that its
        destructor does not run; Python's exit would then wait for ever for workers that ignore SIGTERM."""
        iterator, self._iterator = self._iterator, iter(())
        self._drawn.clear()
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()
            for worker in iterator._workers:
                worker.kill()  # one that is stuck in a read has not ended

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        self._began = self._began or time.perf_counter()
        try:
            drawn = self._drawn.popleft() if self._drawn else next(self._iterator)
            if isinstance(drawn, Exception):
                raise drawn
        except WlbError as error:
            # A worker's error comes with its stack in front of its line.
            line = str(error).strip().splitlines()[-1].removeprefix(f"{WlbError.__module__}.WlbError: ")
            raise RefusedHere(f"wlb_megatron: {line}") from None
        return drawn

    def take_began(self) -> float:
        """When the first micro-batch of the step was asked for (time.perf_counter)."""
        began, self._began = self._began, None
        return began or time.perf_counter()

    def take_rehearsal(self) -> list[dict[str, Any]] | None:
        """The micro-batches to rehearse, the first time they are asked for."""
        taken, self._rehearsal = self._rehearsal, None
        return taken

    def after_step(self, batches: list[dict[str, Any]], *, skipped: bool = False) -> None:
        if self._trained is not None:
            self._trained(batches, skipped)

    def draw_ahead(self, count: int) -> None:
        """Draw micro-batches of the next step until there are `count`. Called while the device is busy.

        Between steps it stands still while micro-batches are drawn, and while threads that a draw wakes (the one that
        plans, the loader's) hold the interpreter: 3 to 7 ms.
        """
        failed = bool(self._drawn) and isinstance(self._drawn[-1], Exception)
        try:
            while not failed and len(self._drawn) < count:
                self._drawn.append(next(self._iterator))
        except Exception as error:
            self._drawn.append(error)  # is the next step's; a loader asked again passes over what failed


class EvaluationIterator(MicroBatchIterator):
    """Over a whole set, again and again; its length is the number of iterations that cover the set once."""

    def __init__(self, loader: DataLoader[dict[str, Any]], iterations: int) -> None:
        super().__init__(loader)
        self._iterations = iterations

    def __len__(self) -> int:
        return self._iterations


def planned_iterator(data_iterator: Any) -> MicroBatchIterator | None:
    """The plugin's iterator inside Megatron's (replayable) one, or None if it is another's."""
    found = getattr(data_iterator, "iterable", data_iterator)
    return found if isinstance(found, MicroBatchIterator) else None


def draw_step(data_iterator: Any) -> list[dict[str, Any]]:
    """A step's micro-batches: as many as the iteration was planned with, whatever Megatron counts."""
    first = next(data_iterator)
    return [first, *(next(data_iterator) for _ in range(first["planned"].steps - 1))]


def activation_shape(batch: dict[str, Any]) -> tuple[int, int, int]:
    """Shape of the hidden states that pipeline stages hand on: [tokens held, 1, hidden]."""
    layout: Layout = batch["layout"]
    tokens = batch["planned"].shard.tokens_per_rank[layout.cp_rank]
    return tokens // layout.activation_divisor, 1, layout.hidden_size


def read_ahead(windows: int, most: int) -> int:
    """Micro-batches that workers read ahead: two iterations of one a window, or one of the most that an iteration may
    be planned with, if those are more."""
    return max(2 * windows, most)


def files_of_workers(windows: int, most: int) -> int:
    """Files that a process has open at most for what a loader's workers hand over: one a tensor, seven a micro-batch,
    of those read ahead, of the iteration drawn ahead, and of the one that trains. most: micro-batches of an
    iteration."""
    return 7 * (read_ahead(windows, most) + 2 * most)


def make_loader(
    corpus: Blend,
    sampler: MicroBatchSampler,
    layout: Layout,
    *,
    workers: int,
    ahead: int,
    pin_memory: bool,
    ignored_signal: int | None = None,
) -> DataLoader[dict[str, Any]]:
    """Loader over the plan; workers read about `ahead` micro-batches before they are asked for.

    ignored_signal: what a scheduler sends to all processes of a job before its end (--exit-signal-handler). The
    trainer saves and exits then; workers that died of it would take the trainer with them first.
    """
    return DataLoader(
        PackedDocuments(corpus, layout),
        batch_sampler=sampler,
        num_workers=workers,
        prefetch_factor=-(-ahead // workers) if workers else None,
        collate_fn=_only,
        pin_memory=pin_memory,
        persistent_workers=bool(workers),
        worker_init_fn=None if ignored_signal is None else partial(_ignore, ignored_signal),
    )


def _ignore(number: int, worker: int) -> None:
    signal.signal(number, signal.SIG_IGN)


def _only(items: list[dict[str, Any]]) -> dict[str, Any]:
    (item,) = items
    return item
