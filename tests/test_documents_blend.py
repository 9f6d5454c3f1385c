"""Blends and splits follow Megatron's own rules, and one range of ids reads tokens from every corpus."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_documents_indexed import write_index

from wlb_megatron.documents.blend import SPLITS, Blend, parse_blend, split_bounds
from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.lengths import pieces_of, sample_lengths
from wlb_megatron.documents.stream import END, START, CorpusWalk, DocumentStream, epochs
from wlb_megatron.errors import WlbError


def write_corpus(path: Path, lengths: list[int], first_token: int) -> str:
    """One sequence a document; tokens count up from first_token."""
    tokens = np.arange(first_token, first_token + sum(lengths), dtype="<u2")
    path.with_suffix(".bin").write_bytes(tokens.tobytes())
    write_index(path.with_suffix(".idx"), lengths)
    return str(path)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    first = write_corpus(tmp_path / "a", [3, 0, 2, 4, 1], 100)
    return [first, write_corpus(tmp_path / "b", [5, 5, 6], 200)]


def test_ids_run_on_over_the_corpora_and_read_their_tokens(two: list[str]) -> None:
    blend = Blend(two)
    assert blend.read(2, 0, 2).tolist() == [103, 104]
    assert blend.read(6, 1, 4).tolist() == [206, 207, 208]
    assert blend.read(7, 0, 6).tolist() == list(range(210, 216))
    assert [blend.length(document) for document in range(8)] == [3, 0, 2, 4, 1, 5, 5, 6]
    documents = np.array([7, 0, 5, 4, 1, 7])
    assert blend.lengths_of(documents).tolist() == [blend.length(int(document)) for document in documents]
    assert not len(blend.lengths_of(documents[:0]))
    for document in (-1, 8):
        with pytest.raises(IndexError):
            blend.lengths_of(np.array([0, document]))
        with pytest.raises(IndexError):
            blend.length(document)
        with pytest.raises(IndexError):
            blend.read(document, 0, 1)


def test_a_stream_over_a_blend_reads_every_token_once_and_parts_share_no_document(two):
    blend = Blend(two)
    stream = DocumentStream(blend.corpora(), Rules(4, seed=1))
    pieces = iter(stream.next, None)
    tokens = [blend.read(piece.document, piece.start, piece.end).tolist() for piece in pieces]
    assert sorted(chain(*tokens)) == [*range(100, 110), *range(200, 216)]
    blend = Blend(two, [1.0, 3.0])
    streams = [DocumentStream(blend.corpora("60,20,20", part), Rules(100)) for part in SPLITS]
    seen = [piece.document for stream in streams for piece in iter(stream.next, None)]
    assert sorted(seen) == [0, 2, 3, 4, 5, 6, 7]  # 1 is empty


def test_corpora_without_weights_are_drawn_by_their_tokens_and_those_of_none_keep_their_ids(two):
    assert [corpus.weight for corpus in Blend(two).corpora()] == [10.0, 16.0]
    # Weight 0, or no token in the part.
    (only,) = Blend(two, [0.0, 1.0]).corpora()
    assert (only.first_id, only.weight) == (5, 1.0)
    assert Blend(two).corpora("1,0,0", "test") == []
    # The same corpus twice has two ids for each document.
    blend = Blend([two[1], two[1]], [1.0, 1.0])
    assert [corpus.first_id for corpus in blend.corpora()] == [0, 3]
    assert blend.read(1, 0, 5).tolist() == blend.read(4, 0, 5).tolist()
    with pytest.raises(WlbError, match="2 corpora but 1 weights"):
        Blend(two, [1.0])


@pytest.mark.parametrize(
    ("values", "prefixes", "weights"),
    [
        (["a"], ["a"], None),
        (["a", "b"], ["a", "b"], None),
        (["30", "a", "70", " b "], ["a", "b"], [30.0, 70.0]),
        (["0.5", "a"], ["a"], [0.5]),
        (["a", "b", "c"], ["a", "b", "c"], None),
    ],
)
def test_data_path_is_read_as_megatron_reads_it(values, prefixes, weights):
    assert parse_blend(values) == (prefixes, weights)
    utils = pytest.importorskip("megatron.core.datasets.utils")
    assert utils.get_blend_from_list(values) == (prefixes, weights)


@pytest.mark.parametrize(
    "values", [[], ["1", "a", "b", "c"], ["-1", "a"], ["0", "a", "0", "b"], ["nan", "a"]]
)
def test_a_blend_that_makes_no_sense_is_refused(values: list[str]) -> None:
    with pytest.raises(WlbError):
        parse_blend(values)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(0, 10**7))
def test_a_split_lands_on_the_documents_that_megatron_would_take(shares: list[int], documents: int) -> None:
    split = ",".join(map(str, shares))
    bounds = split_bounds(split, documents)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == documents
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    for ours, theirs in zip(bounds, matrix, strict=True):
        if theirs is None:
            assert ours[0] == ours[1]
        else:
            assert ours == tuple(round(end * float(documents)) for end in theirs)


@pytest.mark.parametrize("split", ["", "0,0", "1,1,1,1", "a", "1..2,3"])
def test_a_split_that_makes_no_sense_is_refused(split: str) -> None:
    with pytest.raises(WlbError, match="no shares to read"):
        split_bounds(split, 10)


@pytest.mark.parametrize(("weights", "first"), [((1.0, 1.0), "small"), ((1.0, 9.0), "large")])
def test_the_corpus_that_comes_again_first_is_known_with_the_tokens_given_by_then(weights, first):
    """300 tokens at half of the tokens last for 600; 1,500 at nine tenths for 1,667."""
    lengths = {"small": [10] * 30, "large": [15] * 100}
    rows = zip(lengths.items(), (0, 30), weights, strict=True)
    corpora = [Corpus(name, np.array(tokens), begin, weight) for (name, tokens), begin, weight in rows]
    stream = DocumentStream(corpora, Rules(window=64))
    name, expected = stream.first_pass()
    given = 0
    while max(epochs(stream.state())) < 1:
        given += stream.next().tokens
    assert name == first and abs(given - expected) <= 30


LARGE = 1 << 17


@pytest.mark.parametrize("period", [2, 3, 4, 8])
def test_kinds_that_alternate_are_sampled_as_often_as_they_are(period):
    lengths = np.where(np.arange(LARGE) % period == 0, 7, 900)
    sample = sample_lengths(lengths, 1000, "split")
    assert len(sample) == 65536
    assert sample.count(7) / len(sample) == pytest.approx(1 / period, rel=0.03)
    halves = [sample[:32768].count(7), sample[32768:].count(7)]  # order is random, too
    assert halves[0] == pytest.approx(halves[1], rel=0.06)


def test_a_sample_is_the_same_each_time_and_of_plain_integers():
    lengths = np.arange(1, LARGE, dtype=np.int32)
    sample = sample_lengths(lengths, LARGE, "split")
    assert sample == sample_lengths(lengths, LARGE, "split") and {*map(type, sample)} == {int}
    assert len({*sample}) == len(sample)  # each document once


@pytest.mark.parametrize("at", [0, 1, LARGE - 1])
def test_all_is_looked_at_before_nothing_is_found(at):
    lengths = np.zeros(LARGE, dtype=np.int64)
    lengths[at] = 50
    assert sample_lengths(lengths, 40, "split") in ([40, 10], [10, 40])
    assert sample_lengths(lengths, 40, "truncate") == [40]
    assert sample_lengths(lengths, 40, "drop") == []
    assert sample_lengths(np.zeros(0, dtype=np.int64), 40, "split") == []


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_pieces_are_those_that_a_walk_gives(overlong):
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 60, 500) * (rng.random(500) < 0.7)
    walk, walked = CorpusWalk(Corpus("one", lengths), Rules(16, overlong), 0), []
    while len(rows := walk.advance()):
        walked += (rows[:, END] - rows[:, START]).tolist()
    assert sorted(pieces_of(lengths, 16, overlong).tolist()) == sorted(walked)


def test_a_stream_s_next_lengths_are_told_in_its_mixture_without_being_taken():
    corpora = [
        Corpus("rare", np.full(5000, 3), weight=1.0),
        Corpus("often", np.full(9000, 8), 5000, weight=3.0),
    ]
    stream = DocumentStream(corpora, Rules(16, "split", 1, endless=True))
    for _ in range(77):
        stream.next()
    before = stream.state()
    coming = stream.peek(4000)
    assert stream.state() == before
    assert coming == [piece.tokens for _ in range(4000) if (piece := stream.next())]
    tokens = {length: length * coming.count(length) for length in (3, 8)}
    assert tokens[8] / tokens[3] == pytest.approx(3.0, rel=0.02)
    finite = DocumentStream.of_lengths([4, 0, 9], Rules(8, "split"))
    assert finite.peek(99) == [4, 8, 1] and finite.next() is not None
