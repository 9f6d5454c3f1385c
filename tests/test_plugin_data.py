"""What a rank reads of a planned micro-batch: tokens, labels, loss mask and positions, by document and not by value."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise, tee
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_runs import rewrite_corpus
from packing_oracle import make_planner
from torch.utils.data._utils.pin_memory import pin_memory

from wlb_megatron.documents.blend import Blend
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.pipeline.orders import links_of
from wlb_megatron.plan import Piece, PlanSummary
from wlb_megatron.plugin.micro_batches.iterators import (
    MicroBatchIterator,
    MicroBatchSampler,
    WholeSetIterator,
    files_of_workers,
    make_loader,
    over_and_over,
    read_ahead,
)
from wlb_megatron.plugin.micro_batches.loaded import DocumentRows, Layout, PackedDocuments
from wlb_megatron.plugin.micro_batches.planning import PlanAhead, PlannedIteration, PlannedMicroBatch
from wlb_megatron.plugin.step.pipeline_shapes import _drawn
from wlb_megatron.refusals import Refused, RefusedHere
from wlb_megatron.sharding.cut import pad, shard, shard_all

SUMMARY = PlanSummary(0, 0, 0, 0, 1.0, 1.0, 1.0, 1, 0, 0.0, 0, 0)
SHARDINGS = ["per-sequence", "per-document", "hybrid"]


HOLDS_TOKENS = Layout(0, 1, 8, True)
ALL_TENSORS = Layout(0, 1, 8, True, routes=True, follows=1, by_document=True)
"""Of which each micro-batch has six."""


def planned(pieces: list[Piece], cp: int = 1, sharding: str = "per-document") -> PlannedMicroBatch:
    padded = pad(tuple(pieces), cp)
    plan = shard(np.array([piece.tokens for piece in padded], dtype=np.int64), cp, sharding)
    return PlannedMicroBatch(0, 0, padded, plan, SUMMARY, 0.0)


def read(corpus: Blend, micro_batch: PlannedMicroBatch, rank: int, depth: int = 0) -> dict[str, list[float]]:
    held = PackedDocuments(corpus, Layout(rank, 1, 8, True, follows=depth))[micro_batch].held
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    return {key: getattr(held, key)[depth].tolist() for key in keys}


def corpus_of(folder: Path, documents: list[list[int]]) -> Blend:
    rewrite_corpus(folder / "documents", [np.array(document, dtype=np.int32) for document in documents])
    return Blend([str(folder / "documents")])


def whole(document: int, tokens: int = 4, **changes: Any) -> PlannedMicroBatch:
    """A micro-batch of one document."""
    return replace(planned([Piece(0, document, 0, tokens)]), **changes)


def loader_of(
    corpus: Blend, sampler: Any, layout: Layout = HOLDS_TOKENS, workers: int = 1, **more: Any
) -> Any:
    of_job = {"workers": workers, "device": SimpleNamespace(on_gpu=False), "ignored_signal": None} | more
    return make_loader(corpus, sampler, layout, SimpleNamespace(**of_job), more.get("prefetched", 4))


def test_labels_shift_inside_a_document_before_it_is_cut_and_none_predicts_the_next_document(tmp_path):
    """Tokens 0..7 as one document, CP=2: rank 0 holds 0 1 6 7 and predicts 1 2 7 nothing, rank 1 3 4 5 6."""
    corpus = corpus_of(tmp_path, [list(range(8))])
    micro_batch = planned([Piece(0, 0, 0, 8)], 2, "per-document")
    first, second = read(corpus, micro_batch, 0), read(corpus, micro_batch, 1)
    assert first["tokens"] == [0, 1, 6, 7] and first["labels"][:3] == [1, 2, 7]
    assert first["loss_mask"] == [1, 1, 1, 0]
    assert (second["tokens"], second["labels"]) == ([2, 3, 4, 5], [3, 4, 5, 6])
    assert second["loss_mask"] == [1, 1, 1, 1]
    corpus = corpus_of(tmp_path, [[1, 2, 3], [11, 12, 13]])
    batch = read(corpus, planned([Piece(0, 0, 0, 3), Piece(0, 1, 0, 3)]), 0)
    assert batch["tokens"] == [1, 2, 3, 11, 12, 13]
    assert batch["position_ids"] == [0, 1, 2, 0, 1, 2]
    assert batch["loss_mask"] == [1, 1, 0, 1, 1, 0]
    labels = [label for label, counts in zip(batch["labels"], batch["loss_mask"], strict=True) if counts]
    assert labels == [2, 3, 12, 13]
    # A cut piece still predicts the token that follows it.
    corpus = corpus_of(tmp_path, [[1, 2, 3, 4, 5]])
    head, tail = (read(corpus, planned([Piece(0, 0, *ends)]), 0) for ends in ((0, 3), (3, 5)))
    assert (head["labels"], head["loss_mask"]) == ([2, 3, 4], [1, 1, 1])
    assert (tail["tokens"], tail["position_ids"], tail["loss_mask"]) == ([4, 5], [0, 1], [1, 0])
    # End of document, padding and ordinary tokens all 0: every token inside a document still counts.
    corpus = corpus_of(tmp_path, [[0, 0, 0, 0, 0], [0, 0]])
    micro_batch = planned([Piece(0, 0, 0, 5), Piece(0, 1, 0, 2)], 4, "per-document")
    assert micro_batch.pieces[-1] == Piece(0, -1, 0, 1)
    counted = sum(sum(read(corpus, micro_batch, rank)["loss_mask"]) for rank in range(4))
    assert counted == 4 + 1


def chunked(micro_batches: list[list[Piece]], cp: int, sharding: str) -> list[PlannedMicroBatch]:
    """An iteration of one data-parallel rank whose pieces may have prefixes."""
    padded = [pad(tuple(pieces), cp) for pieces in micro_batches]
    lengths = [np.array([piece.tokens for piece in pieces], dtype=np.int64) for pieces in padded]
    plans = shard_all(lengths, cp, sharding, links=links_of(padded))
    return [
        PlannedMicroBatch(0, index, pieces, plan, SUMMARY, 0.0)
        for index, (pieces, plan) in enumerate(zip(padded, plans, strict=True))
    ]


def test_a_chunks_last_token_predicts_the_first_of_the_next_and_positions_go_on(tmp_path):
    corpus = corpus_of(tmp_path, [[1, 2, 3, 4, 5, 6], [11, 12]])
    head, middle, tail = chunked(
        [[Piece(0, 0, 0, 3)], [Piece(0, 1, 0, 2), Piece(0, 0, 3, 4, 3)], [Piece(0, 0, 4, 6, 4)]],
        1,
        "per-document",
    )
    # Tokens, labels, mask and positions.
    assert [*read(corpus, head, 0).values()] == [[1, 2, 3], [2, 3, 4], [1, 1, 1], [0, 1, 2]]
    assert [*read(corpus, middle, 0).values()] == [[11, 12, 4], [12, 0, 5], [1, 0, 1], [0, 1, 3]]
    assert [*read(corpus, tail, 0).values()] == [[5, 6], [6, 0], [1, 0], [4, 5]]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_chunks_over_ranks_hold_together_what_the_whole_document_does(cp, sharding, depth, tmp_path):
    """Tokens, labels, masks and positions of every token, and what they are `depth` tokens later in the document; of a
    part [3, 40) of a document, too, cut from its front and its end."""
    documents = [list(range(100 * d, 100 * d + n)) for d, n in ((1, 41), (2, 30), (3, 7))]
    corpus = corpus_of(tmp_path, documents)
    iteration = [
        [Piece(0, 0, 3, 17), Piece(0, 1, 0, 9)],
        [Piece(0, 1, 9, 10, 9), Piece(0, 0, 17, 19, 14)],
        [Piece(0, 2, 0, 7), Piece(0, 0, 19, 40, 16), Piece(0, 1, 10, 30, 10)],
    ]
    held = []
    for micro_batch in chunked(iteration, cp, sharding):
        for rank in range(cp):
            now, later = read(corpus, micro_batch, rank)["tokens"], read(corpus, micro_batch, rank, depth)
            held += [row for row in zip(now, *later.values(), strict=True) if row[0] >= 100]
    expected = []
    for d, first, end in ((0, 3, 40), (1, 0, 30), (2, 0, 7)):
        for at in range(first, end):
            token, label = [*documents[d], 0][at + depth :][:2] if at + depth < end else (0, 0)
            position = (at + depth - first) * (token > 0)
            expected.append((documents[d][at], token, label, float(label > 0), position))
    assert sorted(held) == sorted(expected)


def test_a_step_counts_a_document_in_chunks_as_the_whole_one(tmp_path):
    """FLOPs are of tokens and squared lengths: chunk [s, e) has e * e - s * s of these, all together the document's."""
    corpus = corpus_of(tmp_path, [[1] * 50, [2] * 8])
    middle = [Piece(0, 1, 0, 8), Piece(0, 0, 20, 33, 20)]
    iteration = [[Piece(0, 0, 0, 20)], middle, [Piece(0, 0, 33, 50, 33)]]
    for layout in (HOLDS_TOKENS, Layout(1, 1, 8, False)):
        reader = PackedDocuments(corpus, layout)
        lengths = [reader[each].document_lengths().tolist() for each in chunked(iteration, 4, "per-document")]
        assert lengths == [[], [8], [50]]


@pytest.mark.parametrize(("wild", "at"), [(-7, 2), (50, 2), (50, 6)])
def test_a_token_id_outside_the_vocabulary_is_an_error_that_names_corpus_document_and_token(
    wild, at, tmp_path
):
    """Token 6 is no token of the piece, but the last one's label."""
    document = [49, 0, 1, 2, 3, 4, 5, 6]
    document[at] = wild
    corpus = corpus_of(tmp_path, [[1], document])
    micro_batch = planned([Piece(0, 1, 1, 6)])
    right = PackedDocuments(corpus, Layout(0, 1, 8, True, vocabulary=100))
    words = f"documents: document 1 has token id {wild} at token {at}, .* ends at 49"
    with pytest.raises(WlbError, match=words):
        PackedDocuments(corpus, Layout(0, 1, 8, True, vocabulary=50))[micro_batch]
    assert wild < 0 or right[micro_batch].held.labels[0, -1] == document[6]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_workers_error_ends_the_run_with_its_own_line(workers, tmp_path):
    corpus = corpus_of(tmp_path, [[1, 2], [3, 99]])
    iteration = PlannedIteration((whole(0, 2), whole(1, 2)), {}, b"")
    layout = Layout(0, 1, 8, True, vocabulary=50)
    iterator = MicroBatchIterator(loader_of(corpus, MicroBatchSampler([iteration]), layout, workers))
    next(iterator)
    iterator.draw_ahead(1)
    with pytest.raises(Refused) as refused:
        next(iterator)
    iterator.close()
    line = f"wlb_megatron: error: {tmp_path}/documents: document 1 has token id 99"
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    cp=st.sampled_from([1, 2, 3, 4]),
    sharding=st.sampled_from(SHARDINGS),
)
def test_ranks_together_hold_what_one_document_at_a_time_gives(tmp_path_factory, lengths, cp, sharding):
    generator = np.random.default_rng(len(lengths))
    documents = [generator.integers(0, 3, length).tolist() for length in lengths]
    corpus = corpus_of(tmp_path_factory.mktemp("corpus"), documents)
    micro_batch = planned([Piece(0, d, 0, n) for d, n in enumerate(lengths)], cp, sharding)
    expected = sorted(
        (position, token, *((1, document[position + 1]) if position + 1 < len(document) else (0, 0)))
        for document in documents
        for position, token in enumerate(document)
    )
    found = []
    padding = sum(piece.tokens for piece in micro_batch.pieces if piece.document < 0)
    for rank in range(cp):
        batch = read(corpus, micro_batch, rank)
        sizes = {len(values) for values in batch.values()}
        assert sizes == {micro_batch.shard.tokens_per_rank[rank]}
        columns = (batch["position_ids"], batch["tokens"], map(int, batch["loss_mask"]), batch["labels"])
        found += list(zip(*columns, strict=True))
    for position in range(padding):
        found.remove((position, 0, 0, 0))
    assert sorted(found) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_ahead_without_changing_order_or_state(workers, tmp_path):
    """What was prefetched is not what was trained: the sampler passes each iteration with its own state."""
    corpus = corpus_of(tmp_path, [[d] * 4 for d in range(12)])

    def plans() -> Iterator[PlannedIteration]:
        for number in range(6):
            batches = tuple(whole(2 * number + m, iteration=number, index=m) for m in range(2))
            yield PlannedIteration(batches, partial(dict, iteration=number + 1), bytes([number] * 8))

    sampler = MicroBatchSampler(PlanAhead(plans, depth=2))
    loader = loader_of(corpus, sampler, workers=workers)
    batches = [(each.planned, each.held) for each in MicroBatchIterator(loader)]
    seen = [(plan.iteration, plan.index, held.tokens[0].tolist()) for plan, held in batches]
    assert seen == [(i, m, [2 * i + m] * 4) for i in range(6) for m in range(2)]
    assert {i: p.state()["iteration"] for i, p in sampler.passed.items()} == {i: i + 1 for i in range(6)}


def test_a_step_draws_the_next_ones_micro_batches_from_its_second_on_and_leaves_an_error_to_it():
    drawn = []

    def stream() -> Iterator[dict[str, Any]]:
        for number in range(5):
            drawn.append(number)
            yield {"number": number}
        raise ValueError("no more plans")

    iterator = MicroBatchIterator(stream())
    assert [next(iterator)["number"] for _ in range(2)] == drawn == [0, 1]
    iterator.draw_ahead(2)
    assert drawn == [0, 1, 2, 3]
    assert next(iterator)["number"] == 2  # a step of another size: nothing is lost
    iterator.draw_ahead(1)
    assert drawn == [0, 1, 2, 3]
    iterator.draw_ahead(3)
    assert [next(iterator)["number"] for _ in range(2)] == [3, 4], "the step before is whole"
    with pytest.raises(ValueError, match="no more plans"):
        next(iterator)
    due: list[int] = []
    seen = [(batch, list(due)) for batch in _drawn("abcd", due.append)]
    assert seen == [("a", []), ("b", [2]), ("c", [2, 3]), ("d", [2, 3, 4])]
    assert list(_drawn("ab")) == ["a", "b"]


def test_after_an_error_nothing_more_is_drawn():
    """A loader whose worker died would wait again, and go on with another worker's micro-batch."""
    asked: list[int] = []

    class Loader:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> dict[str, Any]:
            asked.append(len(asked))
            if len(asked) == 2:
                raise RuntimeError("a worker is gone")
            return {"number": len(asked)}

    iterator = MicroBatchIterator(Loader())
    for count in (2, 3, 4):
        iterator.draw_ahead(count)
    assert len(asked) == 2 and next(iterator)["number"] == 1
    with pytest.raises(RuntimeError, match="a worker is gone"):
        next(iterator)


def test_evaluations_begin_at_the_sets_beginning_and_are_planned_when_the_first_comes_to_them():
    cases = (4, [0, 1, 2, 0, 0, 1, 2, 0, 0]), (2, [0, 1, 0, 1]), (3, [0, 1, 2, 0]), (None, [0, 1, 2, 0])
    for iterations, expected in cases:
        again = over_and_over(iter([0, 1, 2]), iterations)
        assert [*islice(again, len(expected))] == expected
    planned: list[int] = []

    def plans() -> Iterator[int]:
        for at in range(5):
            planned.append(at)
            yield at

    evaluation = over_and_over(plans(), 4)
    assert planned == []
    assert [next(evaluation), next(evaluation)] == planned == [0, 1]
    assert [*islice(evaluation, 6)] == [2, 3, 0, 1, 2, 3] and planned == [0, 1, 2, 3]
    again, once = tee(plans())
    whole, evaluation = WholeSetIterator([], once), over_and_over(again, None)
    assert next(evaluation) == 0 and planned[4:] == [0]
    assert len(whole) == len(whole) == 5 and [*islice(evaluation, 6)] == [1, 2, 3, 4, 0, 1]
    assert planned[4:] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaders_workers_serve_all_evaluations_and_each_iteration_is_planned_once(workers, tmp_path):
    corpus = corpus_of(tmp_path, [[d] * 4 for d in range(3)])
    made: list[int] = []

    def plans() -> Iterator[PlannedIteration]:
        for iteration in range(3):
            made.append(iteration)
            yield PlannedIteration((whole(iteration, iteration=iteration),), dict, b"")

    iterator = MicroBatchIterator(
        loader_of(corpus, MicroBatchSampler(over_and_over(plans(), 4)), workers=workers)
    )
    processes = [worker.pid for worker in getattr(iterator._iterator, "_workers", [])]
    assert (made == []) == (workers == 0) and len(processes) == workers
    drawn = [int(batch.held.tokens[0, 0]) for batch in islice(iterator, 9)]
    assert drawn == [0, 1, 2, 0, 0, 1, 2, 0, 0] and made == [0, 1, 2]
    assert processes == [worker.pid for worker in getattr(iterator._iterator, "_workers", [])]
    iterator.close()


def no_shared_memory(*_: object) -> None:
    raise RuntimeError(
        "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"
    )


def no_semaphore(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("place", "fails"),
    [
        ("torch.UntypedStorage._share_fd_cpu_", no_shared_memory),  # in a worker: the trainer waited for ever
        ("multiprocessing.synchronize.SemLock.__init__", no_semaphore),  # before there are workers
    ],
)
def test_a_full_dev_shm_ends_the_run_with_the_cure(place, fails, tmp_path, monkeypatch):
    iteration = PlannedIteration((whole(0, 3),), dict, b"")
    loader = loader_of(corpus_of(tmp_path, [[1, 2, 3]]), MicroBatchSampler([iteration]), prefetched=1)
    monkeypatch.setattr(place, fails)
    line = r"^wlb_megatron: error: /dev/shm is full.*--shm-size.*--num-workers 0"
    with pytest.raises(RefusedHere, match=line) as refused:
        next(MicroBatchIterator(loader))
    assert len(str(refused.value).splitlines()) == 1


def test_an_error_while_planning_is_raised_where_the_plan_is_asked_for():
    def broken() -> object:
        raise ValueError("no such plan")
        yield

    with pytest.raises(ValueError, match="no such plan"):
        list(PlanAhead(broken, depth=1))


def test_a_stage_that_needs_no_tokens_reads_none_and_flops_are_told_by_document_without_padding(tmp_path):
    corpus = corpus_of(tmp_path, [[1, 2]])
    batch = PackedDocuments(corpus, Layout(0, 1, 8, False))[whole(0, 2)]
    tensors = [name for name, value in batch._asdict().items() if torch.is_tensor(value)]
    assert batch.held is None and tensors == [] and batch.document_lengths().tolist() == [2]
    # What Megatron sums squares of: 8 documents of 512 are an eighth of one of 4,096; 3 tokens of padding none.
    corpus = corpus_of(tmp_path, [[1] * 4096, *([2] * 512 for _ in range(8)), [3] * 5])
    layout = Layout(0, 1, 8, False)

    def squares(pieces: list[Piece]) -> int:
        loaded = PackedDocuments(corpus, layout)[planned(pieces, 4, "per-document")]
        return int((loaded.document_lengths() ** 2).sum())

    one = squares([Piece(0, 0, 0, 4096)])
    assert one == 8 * squares([Piece(0, d, 0, 512) for d in range(1, 9)]) == 4096**2
    assert squares([Piece(0, 9, 0, 5)]) == 25


def test_the_loader_pins_every_tensor_of_a_micro_batch(tmp_path, monkeypatch):
    """Else copies to the GPU wait. A stand-in for pinned memory, which needs a GPU: the tensors that it gave."""
    corpus = corpus_of(tmp_path, [[1, 2, 3], [4, 5]])
    packed = planned([Piece(0, 0, 0, 3), Piece(0, 1, 0, 2)], 2)
    micro_batch = replace(packed, predictions=(4, 2))
    loaded = PackedDocuments(corpus, ALL_TENSORS)[micro_batch]
    pinned_tensors: list[torch.Tensor] = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda self: pinned_tensors.append(self.clone()) or pinned_tensors[-1]
    )
    pinned = pin_memory(loaded)

    def tensors(parts: Any) -> dict[str, torch.Tensor]:
        return {name: value for name, value in parts._asdict().items() if torch.is_tensor(value)}

    actual, expected = tensors(pinned) | tensors(pinned.held), tensors(loaded) | tensors(loaded.held)
    assert len(actual) == 6 and list(actual) == list(expected)
    assert all(any(value is tensor for tensor in pinned_tensors) for value in actual.values())
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())
    assert pinned.planned is loaded.planned and pinned.held.predicted == 2.0


def test_workers_outlive_the_signal_that_tells_the_trainer_to_save_and_exit(tmp_path):
    """A scheduler signals every process of a job; a worker that dies of it fails the trainer's next read."""
    corpus = corpus_of(tmp_path, [[d] * 4 for d in range(8)])
    items = [[whole(d)] for d in range(8)]
    loader = loader_of(corpus, items, prefetched=2, ignored_signal=signal.SIGTERM)
    batches = iter(loader)
    assert next(batches).held.tokens[0, 0] == 0
    (worker,) = batches._workers
    os.kill(worker.pid, signal.SIGTERM)
    assert [int(batch.held.tokens[0, 0]) for batch in batches] == list(range(1, 8))


def files_of_tensors() -> set[str]:
    """Names of the files by which workers have handed over the tensors that this process holds."""
    links = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return {link for link in links if "/torch_" in link}


def test_files_of_two_iterations_of_many_micro_batches_a_window_are_counted(tmp_path):
    """A window in eight micro-batches: those that train and those drawn ahead are held, others are read meanwhile.

    By name: files of earlier tests may be closed meanwhile, when what holds them is collected.
    """
    corpus = corpus_of(tmp_path, [[d] * 4 for d in range(40)])
    items = [[whole(d, predictions=(3, 2))] for d in range(40)]
    loader = loader_of(corpus, items, ALL_TENSORS, prefetched=read_ahead(1, 8))
    assert loader.prefetch_factor == 8
    iterator = MicroBatchIterator(loader)
    before = files_of_tensors()
    held = [next(iterator) for _ in range(16)]
    opened = len(files_of_tensors() - before)
    iterator.close()
    assert 6 * 16 <= opened <= files_of_workers(1, 8) and len(held) == 16
    assert (read_ahead(4, 4), files_of_workers(4, 4)) == (8, 6 * 16)


def test_closing_ends_a_worker_that_ignores_the_signal_and_is_stuck_in_a_read(tmp_path, monkeypatch):
    corpus = corpus_of(tmp_path, [[d] * 4 for d in range(8)])
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    reading = multiprocessing.Event()
    monkeypatch.setattr(corpus, "read", lambda *_: (reading.set(), threading.Event().wait()))
    items = [[whole(d)] for d in range(8)]
    iterator = MicroBatchIterator(loader_of(corpus, items, prefetched=2, ignored_signal=signal.SIGTERM))
    (worker,) = iterator._iterator._workers
    assert reading.wait(30)
    iterator.close()
    worker.join(10)
    assert worker.exitcode == -signal.SIGKILL


def test_reading_a_long_micro_batch_takes_memory_for_its_tokens_and_no_mask_of_their_square(tmp_path):
    """128K tokens: token, label and position of 8 bytes, a mask of 4; S x S of one bit would be 2 GiB."""
    tokens = 131072
    corpus = corpus_of(tmp_path, [[7] * (tokens // 2), [8] * (tokens // 4), [9] * (tokens // 4)])
    pieces = [Piece(0, document, 0, corpus.length(document)) for document in range(3)]
    dataset, micro_batch = PackedDocuments(corpus, HOLDS_TOKENS), planned(pieces)
    tracemalloc.start()
    batch = dataset[micro_batch]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.held.tokens.numel() == tokens
    assert peak < 100 * tokens


def test_documents_without_a_token_in_the_files_are_passed_over_and_counted(tmp_path):
    corpus = corpus_of(tmp_path, [[], [1, 2, 3], [], [4], []])
    stream = DocumentStream(corpus.corpora(), Rules(window=8))
    planner = make_planner(stream, window=8, micro_batches=1)
    plan = planner.next_iteration()
    assert plan is not None and planner.next_iteration() is None
    (micro_batch,) = (candidate for row in plan.micro_batches for candidate in row)
    batch = read(corpus, planned(list(micro_batch.pieces), 1, "hybrid"), 0)
    assert sorted(batch["tokens"]) == [1, 2, 3, 4]
    assert stream.state()["corpora"][0]["empty"] == 3


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    cp=st.integers(1, 4),
    kind=st.sampled_from(SHARDINGS),
)
def test_rows_of_all_ranks_are_put_into_documents_that_begin_where_it_is_told(lengths, cp, kind):
    plan = shard([*lengths, -sum(lengths) % cp] if sum(lengths) % cp else lengths, cp, kind)
    documents = DocumentRows.of(plan)
    segments = [segment for rows in plan.ranks for segment in rows.tolist()]
    gathered = [(piece, token) for piece, start, end in segments for token in range(start, end)]
    if cp > 1:
        gathered = [gathered[row] for row in documents.order.tolist()]
        assert documents.order[documents.gathered.long()].tolist() == [*range(plan.tokens)]
    begins = documents.starts.tolist()
    parts = [gathered[begin:end] for begin, end in pairwise(begins)]
    lengths = enumerate(plan.lengths.tolist())
    expected = [[(piece, token) for token in range(length)] for piece, length in lengths]
    assert sorted(parts) == expected and begins[-1] == plan.tokens


FAILS = """
import atexit, threading
from wlb_megatron.plugin.micro_batches.planning import PlanAhead
def plans():
    yield 1
    threading.Event().wait()  # for a sender that waits for this rank
ahead = PlanAhead(plans, 1)
atexit.register(ahead.close)
next(iter(ahead))
raise RuntimeError("of this rank")
"""


def test_a_rank_that_fails_ends_though_its_planning_waits_for_others():
    ended = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1 and "of this rank" in ended.stderr
