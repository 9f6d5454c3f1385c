"""The document stream: each token once an epoch, the same order everywhere, exact state at any point."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wlb_megatron.documents import stream as stream_module
from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.plan import Piece

LENGTHS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 50)), min_size=1, max_size=30).filter(any)
WEIGHTS = st.sampled_from([0.001, 0.3, 1.0, 2.0, 7.0])


def take(stream: DocumentStream, count: int) -> list[Piece]:
    return list(islice(iter(stream.next, None), count))


def drain(stream: DocumentStream) -> list[Piece]:
    pieces = take(stream, 100_000)
    assert len(pieces) < 100_000
    return pieces


def blend(lengths_of_corpora: list[list[int]], weights: list[float]) -> list[Corpus]:
    first_ids = np.cumsum([0, *map(len, lengths_of_corpora)]).tolist()
    rows = zip(map(np.array, lengths_of_corpora), first_ids, weights, strict=False)
    return [Corpus(f"corpus {i}", *row) for i, row in enumerate(rows)]


@st.composite
def blends(draw: st.DrawFn) -> list[Corpus]:
    lengths_of_corpora = draw(st.lists(LENGTHS, min_size=1, max_size=4))
    return blend(lengths_of_corpora, [draw(WEIGHTS) for _ in lengths_of_corpora])


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    return Rules(
        window=draw(st.integers(5, 60)),
        overlong=draw(st.sampled_from(["split", "truncate"])),
        seed=draw(st.one_of(st.none(), st.integers(0, 3))),
        endless=draw(st.booleans()),
    )


@pytest.fixture(autouse=True, params=[3, 4096], ids=["blocks of 3", "whole blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many documents are cut at once must not show."""
    monkeypatch.setattr(stream_module, "_BLOCK", request.param)


any_blend = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


# --- what comes out ---


def counts_of(stream: DocumentStream) -> SimpleNamespace:
    """What all corpora have given and left out, up to the last piece taken."""
    corpora = stream.state()["corpora"]
    names = ("tokens", "empty", "overlong", "lost_tokens")
    return SimpleNamespace(**{name: sum(corpus[name] for corpus in corpora) for name in names})


@any_blend
@given(blends(), rules())
def test_one_pass_gives_each_token_exactly_once(corpora: list[Corpus], rule: Rules) -> None:
    stream = DocumentStream(corpora, Rules(rule.window, "split", rule.seed, endless=False))
    tokens = Counter((p.document, t) for p in drain(stream) for t in range(p.start, p.end))
    expected = {(c.first_id + d, t) for c in corpora for d, n in enumerate(c.lengths) for t in range(n)}
    assert set(tokens) == expected
    assert set(tokens.values()) == {1}
    assert counts_of(stream).tokens == len(expected)
    assert counts_of(stream).empty == sum(int((c.lengths == 0).sum()) for c in corpora)


@any_blend
@given(blends(), rules(), st.integers(1, 200))
def test_an_endless_stream_gives_each_token_once_per_epoch_of_its_corpus(corpora, rule, count):
    stream = DocumentStream(corpora, Rules(rule.window, "split", rule.seed, endless=True))
    pieces = take(stream, count)
    assert len(pieces) == count
    for c in corpora:
        mine = [p for p in pieces if c.first_id <= p.document < c.first_id + len(c.lengths)]
        assert [p.epoch for p in mine] == sorted(p.epoch for p in mine)
        tokens = Counter((p.epoch, p.document, t) for p in mine for t in range(p.start, p.end))
        assert not tokens or max(tokens.values()) == 1
        for epoch in range(mine[-1].epoch if mine else 0):
            assert sum(1 for key in tokens if key[0] == epoch) == c.lengths.sum()


def reference(corpora: list[Corpus], rule: Rules) -> Iterator[Piece]:
    """Piece by piece in exact arithmetic: the corpus with the fewest tokens for its weight gives the next one."""

    def walk(position: int, corpus: Corpus) -> Iterator[Piece]:
        epoch = 0
        while True:
            order = list(range(len(corpus.lengths)))
            if rule.seed is not None:
                draws = np.random.PCG64(np.random.SeedSequence([rule.seed, position, epoch]))
                keys = [int(draws.random_raw()) for _ in order]
                order.sort(key=keys.__getitem__)
            placed = []
            for place, document in enumerate(order):
                length = int(corpus.lengths[document])
                if rule.overlong == "truncate":
                    length = min(length, rule.window)
                starts = range(0, length, rule.window)
                for number, start in enumerate(starts):
                    # A document's pieces are evenly spaced over the epoch, from where its place in the order puts it.
                    at = Fraction(place + number * len(order), len(starts))
                    if rule.seed is None:
                        at = Fraction(place)
                    piece = Piece(epoch, corpus.first_id + document, start, min(start + rule.window, length))
                    placed.append((at, len(starts) > 1, document, piece))
            yield from (piece for *_, piece in sorted(placed))
            if not rule.endless:
                return
            epoch += 1

    heads = [(walk(i, c), Fraction(c.weight)) for i, c in enumerate(corpora)]
    given_out = [Fraction(0) for _ in heads]
    upcoming: list[Piece | None] = [next(source) for source, _ in heads]
    while any(piece is not None for piece in upcoming):
        live = [i for i, piece in enumerate(upcoming) if piece is not None]
        chosen = min(live, key=lambda i: (given_out[i] / heads[i][1], i))
        piece = upcoming[chosen]
        assert piece is not None
        yield piece
        given_out[chosen] += piece.tokens
        upcoming[chosen] = next(heads[chosen][0], None)


@any_blend
@given(blends(), rules())
def test_the_order_equals_a_piece_by_piece_reference(corpora: list[Corpus], rule: Rules) -> None:
    # Weights that binary fractions hold exactly, so that ties are ties in both.
    corpora = [Corpus(c.name, c.lengths, c.first_id, 2.0 ** round(np.log2(c.weight))) for c in corpora]
    expected = [piece for piece, _ in zip(reference(corpora, rule), range(150), strict=False)]
    assert take(DocumentStream(corpora, rule), 150) == expected


def test_over_long_documents_are_split_truncated_or_dropped_and_counted_and_others_given_whole():
    lengths = [3, 10, 0, 4, 9, 0]

    def run(overlong: str) -> tuple[list[tuple[int, int, int]], tuple[int, ...]]:
        stream = DocumentStream.of_lengths(lengths, Rules(4, overlong))
        pieces = [(p.document, p.start, p.end) for p in drain(stream)]
        counts = counts_of(stream)
        return pieces, (counts.tokens, counts.empty, counts.overlong, counts.lost_tokens)

    split = [(0, 0, 3), (1, 0, 4), (1, 4, 8), (1, 8, 10), (3, 0, 4), (4, 0, 4), (4, 4, 8), (4, 8, 9)]
    assert run("split") == (split, (26, 2, 2, 0))
    assert run("truncate") == ([(0, 0, 3), (1, 0, 4), (3, 0, 4), (4, 0, 4)], (15, 2, 2, 11))
    assert run("drop") == ([(0, 0, 3), (3, 0, 4)], (7, 2, 2, 19))
    for overlong in ("split", "truncate", "drop"):  # a document of exactly the window
        pieces = drain(DocumentStream.of_lengths([8, 1], Rules(8, overlong)))
        assert pieces == [Piece(0, 0, 0, 8), Piece(0, 1, 0, 1)]


def test_counts_include_only_what_was_passed_when_they_are_asked_for():
    stream = DocumentStream.of_lengths([0, 9, 0, 1, 0], Rules(4, "truncate"))
    assert counts_of(stream).empty == 0
    stream.next()
    assert (counts_of(stream).empty, counts_of(stream).overlong, counts_of(stream).lost_tokens) == (1, 1, 5)
    stream.next()
    assert counts_of(stream).empty == 2
    assert stream.next() is None
    assert (counts_of(stream).empty, counts_of(stream).tokens) == (3, 5)
    # A split document counts once its last piece is out.
    stream = DocumentStream.of_lengths([9], Rules(4))
    counted = [counts_of(stream).overlong for _ in range(3) if stream.next()]
    assert counted == [0, 0, 1]


def test_the_end_of_one_pass_is_the_end_for_good_of_a_blend_when_the_last_corpus_ends():
    stream = DocumentStream.of_lengths([1], Rules(4))
    assert [stream.next(), stream.next(), stream.next()] == [Piece(0, 0, 0, 1), None, None]
    pieces = drain(DocumentStream(blend([[1] * 3, [1] * 9], [1.0, 1.0]), Rules(4)))
    assert [p.document for p in pieces] == [0, 3, 1, 4, 2, 5, 6, 7, 8, 9, 10, 11]


def test_pieces_hold_python_integers() -> None:
    piece = DocumentStream.of_lengths(np.array([3], dtype=np.int32), Rules(4, seed=1)).next()
    assert piece is not None
    assert {type(value) for value in piece} == {int}


# --- order ---


def documents(stream: DocumentStream, count: int) -> list[int]:
    return [piece.document for piece in take(stream, count)]


def test_each_epoch_and_each_seed_has_an_order_of_its_own_and_no_seed_the_files():
    n = 200
    orders = []
    for seed in (1, 2):
        order = documents(DocumentStream.of_lengths([1] * n, Rules(4, seed=seed, endless=True)), 3 * n)
        orders += [order[:n], order[n : 2 * n], order[2 * n :]]
    for order in orders:
        assert sorted(order) == list(range(n))
        moved = sum(a != b for a, b in zip(order, range(n), strict=True))
        assert moved > 0.9 * n
    assert len({tuple(order) for order in orders}) == 6
    assert documents(DocumentStream.of_lengths([1] * 4, Rules(4, endless=True)), 8) == [*range(4)] * 2


def test_all_places_are_about_equally_likely() -> None:
    streams = (DocumentStream.of_lengths([1] * 5, Rules(4, seed=seed)) for seed in range(1000))
    firsts = Counter(stream.next().document for stream in streams)
    assert all(140 < firsts[document] < 260 for document in range(5))


def test_a_corpus_given_twice_comes_in_two_orders() -> None:
    n = 100
    twice = blend([[1] * n, [1] * n], [1.0, 1.0])
    order = documents(DocumentStream(twice, Rules(4, seed=7)), 2 * n)
    first, second = [d for d in order if d < n], [d - n for d in order if d >= n]
    assert sorted(first) == sorted(second) == list(range(n))
    assert first != second


def test_a_blend_gives_tokens_by_weight_within_one_document_also_at_extreme_weights():
    rng = np.random.default_rng(0)
    lengths_of_corpora = [rng.integers(1, 100, 50).tolist() for _ in range(3)]
    weights = [0.5, 0.3, 0.2]
    stream = DocumentStream(blend(lengths_of_corpora, weights), Rules(100, seed=1, endless=True))
    tokens = np.zeros(3)
    for step, piece in enumerate(take(stream, 2000)):
        tokens[piece.document // 50] += piece.tokens
        if step > 10:
            assert (abs(tokens - tokens.sum() * np.array(weights)) <= 200).all()
    stream = DocumentStream(blend([[1], [1, 2]], [0.001, 0.999]), Rules(4, seed=1, endless=True))
    pieces = take(stream, 20_000)
    rare = sum(piece.tokens for piece in pieces if piece.document == 0)
    assert rare / sum(piece.tokens for piece in pieces) == pytest.approx(0.001, rel=0.1)


# --- state ---


@any_blend
@given(blends(), rules(), st.integers(0, 120))
def test_a_state_taken_anywhere_resumes_with_the_same_pieces_and_counts(corpora, rule, taken):
    stream = DocumentStream(corpora, rule)
    take(stream, taken)
    state = json.loads(json.dumps(stream.state()))
    again = DocumentStream(corpora, rule)
    take(again, taken % 7)  # whatever it did before
    again.load_state(state)
    assert again.state() == state  # right after loading, before anything is drawn
    assert counts_of(again) == counts_of(stream)
    for _ in range(60):
        assert again.next() == stream.next()
        assert again.state() == stream.state()


def test_neither_asking_for_the_state_nor_what_is_cut_ahead_changes_it():
    asked, other = (DocumentStream.of_lengths([1, 5, 0, 2], Rules(2, seed=3, endless=True)) for _ in range(2))
    for _ in range(20):
        asked.state()
        assert asked.next() == other.next()
    stream = DocumentStream.of_lengths([3] * 100, Rules(4, endless=True))
    take(stream, 10)
    (place,) = stream.state()["corpora"]
    assert (place["cursor"], place["tokens"]) == (10, 30)


def test_counts_and_places_run_on_beyond_32_bits():
    big = 2**30
    stream = DocumentStream.of_lengths([big, 5, big, big], Rules(big, endless=True))
    take(stream, 3)
    assert stream.state()["corpora"][0]["tokens"] == 2**31 + 5
    resumed = DocumentStream.of_lengths([big, 5, big, big], Rules(big, endless=True))
    resumed.load_state(json.loads(json.dumps(stream.state())))
    assert take(resumed, 6) == take(stream, 6)
    assert counts_of(resumed).tokens == 2**31 + 5 + 4 * big + 5 + big
    pieces = drain(DocumentStream.of_lengths(np.array([2**32 + 3]), Rules(2**31)))
    assert pieces == [Piece(0, 0, 0, 2**31), Piece(0, 0, 2**31, 2**32), Piece(0, 0, 2**32, 2**32 + 3)]


@pytest.mark.parametrize(
    ("lengths_of_corpora", "weights", "rule", "message"),
    [
        ([[3, 4], [5]], [1.0, 2.0], {"window": 9}, "window was 8, is 9"),
        ([[3, 4], [5]], [1.0, 2.0], {"seed": 2}, "seed was 1, is 2"),
        ([[3, 4], [5]], [1.0, 2.0], {"seed": None}, "seed was 1, is None"),
        ([[3, 4], [5]], [1.0, 2.0], {"overlong": "drop"}, "overlong was split, is drop"),
        ([[3, 4], [5]], [1.0, 2.0], {"endless": False}, "endless was True, is False"),
        ([[3, 4], [6]], [1.0, 2.0], {}, r"corpus 1: sha256 of lengths was"),
        ([[4, 3], [5]], [1.0, 2.0], {}, r"corpus 0: sha256 of lengths was"),
        ([[3, 4], [5, 5]], [1.0, 2.0], {}, r"corpus 1: documents was 1, is 2"),
        ([[3, 4], [5]], [1.0, 3.0], {}, r"corpus 1: weight was 2.0, is 3.0"),
        ([[3, 4]], [1.0], {}, r"the blend had 2 corpora, has 1"),
    ],
)
def test_a_state_of_other_rules_or_corpora_is_refused_by_name_and_nothing_moves(
    lengths_of_corpora, weights, rule, message
):
    rules = {"window": 8, "seed": 1, "overlong": "split", "endless": True}
    saved = DocumentStream(blend([[3, 4], [5]], [1.0, 2.0]), Rules(**rules))
    take(saved, 3)
    now = DocumentStream(blend(lengths_of_corpora, weights), Rules(**rules | rule))
    before = now.state()
    with pytest.raises(WlbError, match=message):
        now.load_state(saved.state())
    assert now.state() == before


def test_a_corpus_may_move_to_another_folder_but_a_stream_without_one_is_refused():
    state = DocumentStream.of_lengths([3, 4], Rules(8), name="here").state()
    DocumentStream.of_lengths([3, 4], Rules(8), name="there").load_state(state)
    with pytest.raises(WlbError, match="no corpus"):
        DocumentStream([], Rules(8))


@pytest.mark.parametrize("damage", [{"version": 4}, {"corpora": []}, {"corpora": [{}]}, {"fingerprint": 3}])
def test_a_state_of_another_version_or_a_damaged_one_is_refused(damage):
    stream = DocumentStream.of_lengths([3, 4], Rules(8))
    with pytest.raises(WlbError, match=r"version 4|damaged"):
        stream.load_state(stream.state() | damage)


# --- bad input ---


@pytest.mark.parametrize(
    ("lengths", "rule", "message"),
    [
        ([], {}, "no token to train on in 0 documents"),
        ([0, 0], {}, "no token to train on in 2 documents"),
        ([9, 9], {"overlong": "drop"}, "window 8, over-long documents: drop"),
        ([1, -3], {}, r"document 1 has a negative length \(-3\)"),
        ([1.5], {}, "must be a list of integers"),
        ([[1]], {}, "must be a list of integers"),
        ([2**62, 2**62], {}, "more tokens than 64-bit counts can hold"),
        ([1], {"seed": -1}, "seed must not be negative"),
    ],
)
def test_bad_input_is_named_in_one_line(lengths, rule, message):
    with pytest.raises(WlbError, match=message) as caught:
        DocumentStream.of_lengths(np.array(lengths), Rules(**{"window": 8} | rule))
    assert "\n" not in str(caught.value)
