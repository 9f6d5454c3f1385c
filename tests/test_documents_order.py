"""The order of an epoch: a permutation, the same for ever, held in no memory, with long documents' pieces spread."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_oracle import COST

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents import stream as stream_module
from wlb_megatron.documents.corpus import MOST_STORED, EpochOrder, Rules, permuted
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plan import IterationPlan, MicroBatch, Piece, Summariser

LARGE = MOST_STORED + 77


def keys(seed: int) -> np.ndarray:
    return np.random.PCG64(seed).random_raw(8)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_a_computed_order_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(permuted(np.arange(count), count, keys(seed)).tolist()) == list(range(count))


@settings(deadline=None)
@given(st.integers(2, 2**40), st.integers(0, 2**32), st.data())
def test_computed_places_are_distinct_and_within_any_count(count, seed, data):
    begin = data.draw(st.integers(0, count - 1))
    places = np.arange(begin, min(begin + 1000, count))
    images = permuted(places, count, keys(seed))
    assert len(np.unique(images)) == len(places)
    assert images.min() >= 0 and images.max() < count


def test_a_stretch_is_the_same_wherever_it_begins() -> None:
    order = EpochOrder(LARGE, [7, 0, 0])
    whole = order(0, LARGE + 10)
    assert sorted(whole.tolist()) == list(range(LARGE))
    for begin, end in ((0, 1), (5, 4101), (LARGE - 3, LARGE + 4096), (LARGE, LARGE + 4096)):
        assert order(begin, end).tolist() == whole[begin:end].tolist()


def test_orders_are_the_same_for_ever_and_each_seed_epoch_and_corpus_has_its_own():
    """Frozen: a change breaks every resume. The first is stored and sorted, the second computed."""
    assert EpochOrder(10, [1234, 0, 0])(0, 10).tolist() == [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]
    frozen = [811039086, 83283207, 617736726, 332625753, 992927886]
    assert EpochOrder(10**9, [1234, 0, 0])(0, 5).tolist() == frozen
    seeds = [1, 0, 0], [2, 0, 0], [1, 1, 0], [1, 0, 1]
    assert len({tuple(EpochOrder(LARGE, seed)(0, 8)) for seed in seeds}) == 4


def test_a_computed_order_looks_drawn() -> None:
    """Against what draws would give: bounds at five standard deviations, on frozen seeds."""
    order = EpochOrder(LARGE, [3, 0, 0])(0, LARGE) / LARGE
    assert abs(np.corrcoef(order, np.arange(LARGE))[0, 1]) < 5 / LARGE**0.5
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / LARGE**0.5
    # Where 64 documents land in 3,000 orders: 128 cells of 1,500 each.
    at = np.concatenate([permuted(np.arange(64), LARGE, keys(seed)) for seed in range(3000)])
    cells = np.bincount(at * 128 // LARGE, minlength=128)
    assert ((cells - 1500) ** 2 / 1500).sum() < 127 + 5 * (2 * 127) ** 0.5
    # Nor do neighbours stay neighbours: 3,000 orders have 2 x 63 x 3,000 / LARGE = 2.9 pairs that do.
    pairs = np.abs(np.diff(at.reshape(3000, 64), axis=1)) == 1
    assert pairs.sum() < 2.9 + 5 * 2.9**0.5


def test_a_state_of_an_older_version_is_refused() -> None:
    stream = DocumentStream.of_lengths(np.full(9, 3, dtype=np.int32), Rules(8, seed=5, endless=True))
    with pytest.raises(WlbError, match="has version 2, this one reads 3"):
        stream.load_state({**stream.state(), "version": 2})


# --- documents far above the window: pieces spread over the epoch, in their order, each once ---

WINDOW = 64


def books_among_articles() -> np.ndarray:
    """Ten books of 100 windows, and articles that are as many tokens as two thirds of all."""
    rng = np.random.default_rng(3)
    articles = np.minimum(np.exp(rng.normal(2.5, 0.8, 9000)), WINDOW).astype(np.int64) + 1
    return np.concatenate((articles, [100 * WINDOW] * 10))


def stream_of(lengths: Any, window: int = WINDOW) -> DocumentStream:
    return DocumentStream.of_lengths(lengths, Rules(window, seed=1, endless=True))


def largest_shares(stream: DocumentStream, iterations: int) -> list[float]:
    """Of each iteration's tokens, those of the document that has most of them."""
    packer = make_packer(PackingJob(WlbConfig(), COST, window=WINDOW, micro_batches=8))
    planner = Planner(stream, packer, global_tokens=8 * WINDOW)
    shares = []
    for _ in range(iterations):
        plan = planner.next_iteration()
        assert plan is not None
        tokens: Counter[int] = Counter()
        for row in plan.micro_batches:
            for piece in row[0].pieces:
                tokens[piece.document] += piece.tokens
        shares.append(max(tokens.values()) / tokens.total())
    return shares


def test_no_iteration_is_mostly_one_book() -> None:
    """In the order of before, a book filled 12 iterations after each other."""
    lengths = books_among_articles()
    assert max(largest_shares(stream_of(lengths), 400)) <= 0.5


def test_delays_are_told_by_piece_and_not_by_book() -> None:
    """Of one book a piece arrives in each of three iterations, and trains 2, 1 and 0 iterations later; the first was
    cut. What waited before the first plan that is seen counts from there."""
    arrived = [Piece(0, 7, at, at + WINDOW) for at in (0, WINDOW, 2 * WINDOW)]
    halves = [Piece(0, 7, 0, 32), Piece(0, 7, 32, WINDOW)]
    last = (MicroBatch((*halves, arrived[1], arrived[2]), 1),)
    empty = (MicroBatch((), 0),)
    plans = [
        IterationPlan(0, (arrived[0],), (empty,), (arrived[0],)),
        IterationPlan(1, (arrived[1],), (empty,), (arrived[0], arrived[1])),
        IterationPlan(2, (arrived[2],), (last,), ()),
    ]
    for skipped, delayed, mean in ((0, 3, (2 + 1) / 3), (1, 3, (1 + 1) / 3), (2, 0, 0.0)):
        summariser = Summariser()
        summary = [summariser.summarise(plan) for plan in plans[skipped:]][-1]
        assert (summary.delayed, summary.token_delay) == (delayed, pytest.approx(mean))


def test_a_books_pieces_are_evenly_spaced_over_each_epoch_in_their_order() -> None:
    lengths = [1] * 900 + [WINDOW * 30 + 5, WINDOW * 300]
    stream, total = stream_of(lengths), 900 + 31 + 300
    for epoch in range(2):
        pieces = [stream.next() for _ in range(total)]
        for document, count in ((900, 31), (901, 300)):
            places = [at for at, piece in enumerate(pieces) if piece.document == document]
            of_book = [pieces[at] for at in places]
            end = lengths[document]
            starts = range(0, end, WINDOW)
            assert of_book == [Piece(epoch, document, at, min(at + WINDOW, end)) for at in starts]
            gaps = np.diff(places)
            assert len(places) == count and abs(gaps - total / count).max() < 2 + 0.2 * total / count


def test_pieces_of_a_few_books_take_turns_in_an_order_that_is_the_same_for_ever():
    """Frozen: a change breaks every resume."""
    stream = stream_of([5, 9, 2, 16, 1], window=4)
    pieces = [stream.next() for _ in range(11)]
    frozen = [(2, 0), (3, 0), (4, 0), (0, 0), (1, 0), (3, 4), (1, 4), (3, 8), (0, 4), (3, 12), (1, 8)]
    assert [(piece.document, piece.start) for piece in pieces] == frozen
    stream = stream_of([10 * WINDOW] * 3)
    pieces = [stream.next() for _ in range(30)]
    for first in range(0, 30, 3):
        assert {piece.document for piece in pieces[first : first + 3]} == {0, 1, 2}


@pytest.mark.parametrize("block", [3, 4096])
def test_in_file_order_a_state_goes_on_with_a_documents_pieces_after_each_other(block, monkeypatch):
    """From the middle of a book, whose state tells the tokens that are out; and is saved as it was."""
    monkeypatch.setattr(stream_module, "_BLOCK", block)
    lengths = [7, 3 * WINDOW, 0, 20, 2 * WINDOW + 1, 9]
    order = list(range(6))
    expected = [
        Piece(0, document, at, min(at + WINDOW, lengths[document]))
        for document in order
        for at in range(0, lengths[document], WINDOW)
    ]
    at = next(n for n, piece in enumerate(expected) if piece.start)
    document, out = expected[at].document, expected[at].start
    stream = DocumentStream.of_lengths(lengths, Rules(WINDOW, endless=True))
    state = stream.state()
    given = sum(piece.tokens for piece in expected[:at])
    state["corpora"][0] |= {"cursor": order.index(document), "resume": out, "tokens": given}
    stream.load_state(json.loads(json.dumps(state)))
    assert stream.state()["corpora"] == state["corpora"]
    for piece in expected[at:]:
        assert stream.next() == piece
        place = stream.state()["corpora"][0]
        left = 0 if piece.end == lengths[piece.document] else piece.end
        assert (place["cursor"], place["resume"]) == (order.index(piece.document) + (left == 0), left)


@settings(deadline=None)
@given(st.one_of(st.integers(1, 3000), st.integers(MOST_STORED + 1, 2**40)), st.integers(0, 2**32), st.data())
def test_the_place_of_a_document_is_where_the_order_has_it(count, seed, data):
    begin = data.draw(st.integers(0, count - 1))
    for seeds in ([seed, 0, 0], None):
        order = EpochOrder(count, seeds)
        documents = order(begin, begin + 500)
        assert order.places(documents).tolist() == list(range(begin, begin + len(documents)))


def test_a_large_corpus_gives_each_piece_once_and_resumes_anywhere() -> None:
    rng = np.random.default_rng(5)
    lengths = np.where(rng.random(MOST_STORED + 99) < 0.02, rng.integers(9, 900, MOST_STORED + 99), 3)
    stream = stream_of(lengths.astype(np.int32), window=8)
    total = int((-(-lengths // 8)).sum())
    states, pieces = {}, []
    for at in range(total):
        if at % (total // 7) == 5:
            states[at] = json.loads(json.dumps(stream.state()))
        pieces.append(stream.next())
    starts = defaultdict(list)
    for piece in pieces:
        assert piece is not None and piece.epoch == 0
        starts[piece.document].append(piece.start)
    assert all(starts[d] == list(range(0, n, 8)) for d, n in enumerate(lengths.tolist()))
    for at, state in states.items():
        again = stream_of(lengths.astype(np.int32), window=8)
        again.load_state(state)
        assert [again.next() for _ in range(5000)] == pieces[at : at + 5000]


@pytest.mark.parametrize(
    ("lengths", "window", "megabytes"),
    [(np.full(10**7, 3, np.int32), 8, 40), (np.full(1000, 10**5 * WINDOW, np.int64), WINDOW, 20)],
    ids=["10**7 documents, of which an order of 8 bytes each would be 80 MB", "10**8 pieces of books"],
)
def test_neither_many_documents_nor_many_pieces_take_memory_by_their_number(lengths, window, megabytes):
    tracemalloc.start()
    stream = stream_of(lengths, window=window)
    documents = [stream.next().document for _ in range(10_000)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < megabytes * 1e6
    if window == 8:
        assert len(set(documents)) == 10_000
    else:
        assert len(set(documents[:1000])) > 900 and max(Counter(documents[:5000]).values()) <= 6
