"""A run taken up with other corpora, weights, windows or packing: each document still trains once an epoch."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_oracle import make_job, trained

from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.carry import Carried, take_up, waiting_in
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plan import Piece

WINDOW = 64
LENGTHS = {
    "a": [30, 64, 7, 50, 1, 22, 61, 9, 40, 64, 3, 55, 12, 33, 28, 64, 5, 44],
    "b": [10, 20, 60, 2, 64, 31, 15, 48, 6],
    "c": [5] * 40,
}
PACKINGS = [
    {"packing": "varlen", "chunks": "off", "thresholds": "24,40"},
    {"packing": "varlen", "chunks": "off", "thresholds": "none", "max_delay": 3, "max_tokens": 128},
    {"packing": "original"},
]


def corpora(*parts: tuple[str, float]) -> list[Corpus]:
    """Corpora by name and weight, ids counted up."""
    made, first = [], 0
    for name, weight in parts:
        lengths = np.array(LENGTHS[name])
        made.append(Corpus(name, lengths, first, weight))
        first += len(lengths)
    return made


def planner(parts: list[Corpus], packing: dict[str, Any], *, window: int = WINDOW, **rules: Any) -> Planner:
    """Two micro-batches an iteration. rules: of the stream, endless with seed 5 unless they say otherwise."""
    packer = make_packer(make_job(window=window, micro_batches=2, **packing))
    stream = DocumentStream(parts, Rules(window, **{"seed": 5, "endless": True} | rules))
    return Planner(stream, packer, global_tokens=2 * window)


def pieces_of(planned: Planner, iterations: int | None = None) -> list[Piece]:
    """Everything trained in so many iterations, or until the stream ends."""
    pieces: list[Piece] = []
    while iterations is None or iterations:
        plan = planned.next_iteration()
        if plan is None:
            break
        pieces += trained(plan)
        iterations = None if iterations is None else iterations - 1
    return pieces


def tokens_of(pieces: list[Piece], parts: list[Corpus]) -> Counter[tuple[str, int, int, int]]:
    """(corpus, epoch, document, token) of all pieces: by name, not by id."""
    tokens: Counter[tuple[str, int, int, int]] = Counter()
    for piece in pieces:
        corpus = next(c for c in parts if c.first_id <= piece.document < c.first_id + len(c.lengths))
        local = piece.document - corpus.first_id
        tokens.update((corpus.name, piece.epoch, local, at) for at in range(piece.start, piece.end))
    return tokens


def taken_up(before: Planner, after: Planner, **how: Any) -> Carried:
    state = json.loads(json.dumps(before.state()))
    return take_up(after, before.samples, state, **how)


def arriving(planned: Planner, iterations: int, parts: list[Corpus], skip: int = 0) -> dict[str, list[Piece]]:
    """By corpus, the pieces that arrive, ids counted from its first one, after the first `skip`; all that "trained"."""
    by_corpus: dict[str, list[Piece]] = {"trained": []}
    arrived: list[Piece] = []
    for _ in range(iterations):
        plan = planned.next_iteration()
        assert plan is not None
        arrived += plan.arrived
        by_corpus["trained"] += trained(plan)
    for corpus in parts:
        ids = range(corpus.first_id, corpus.first_id + len(corpus.lengths))
        mine = [piece for piece in arrived[skip:] if piece.document in ids]
        by_corpus[corpus.name] = [piece._replace(document=piece.document - ids.start) for piece in mine]
    return by_corpus


@pytest.mark.parametrize("old", range(len(PACKINGS)))
@pytest.mark.parametrize("new", range(len(PACKINGS)))
def test_through_a_change_of_packing_every_token_trains_once_and_what_waited_first(old, new):
    parts = corpora(("a", 1.0), ("b", 2.0))
    for stop in (1, 2, 4):
        before, after = (planner(parts, PACKINGS[at], endless=False) for at in (old, new))
        first = pieces_of(before, stop)
        waiting = waiting_in(before.state())
        assert sorted(waiting) == sorted(before.packer.waiting)
        carried = taken_up(before, after)
        assert sorted(carried.kept) == sorted(waiting) and not carried.lost
        plan = after.next_iteration()
        assert plan is not None
        assert list(plan.arrived[: len(waiting)]) == list(carried.kept)[: len(plan.arrived)]
        rest = trained(plan) + pieces_of(after)
        tokens = tokens_of(first + rest, parts)
        assert set(tokens.values()) == {1} and tokens.total() == sum(map(sum, (LENGTHS["a"], LENGTHS["b"])))


def test_samples_and_trained_tokens_go_on_and_the_state_resumes():
    parts = corpora(("a", 1.0))
    before, after = planner(parts, PACKINGS[0]), planner(parts, PACKINGS[2])
    tokens = sum(p.tokens for p in pieces_of(before, 3))
    taken_up(before, after)
    assert (after.samples, after.began, after.trained) == (6, 6, tokens)
    pieces_of(after, 1)
    state = json.loads(json.dumps(after.state()))
    again = planner(parts, PACKINGS[2])
    again.load_state(state)
    assert again.began == 6
    assert pieces_of(again, 5) == pieces_of(after, 5)


def test_weights_count_from_the_change_on_and_make_up_for_nothing():
    """After 200 iterations at 9 to 1, 1 to 9: the corpus that had little does not come alone for 1,500 more."""
    before = planner(corpora(("a", 9.0), ("b", 1.0)), PACKINGS[2])
    after = planner(corpora(("a", 1.0), ("b", 9.0)), PACKINGS[2])
    pieces_of(before, 200)
    taken_up(before, after)
    tokens = tokens_of(pieces_of(after, 100), corpora(("a", 1.0), ("b", 9.0)))
    share = sum(count for key, count in tokens.items() if key[0] == "b") / tokens.total()
    assert share == pytest.approx(0.9, abs=0.02)
    assert set(tokens.values()) == {1}


@pytest.mark.parametrize("parts", ["b 1.0 a 1.0", "c 1.0 a 1.0 b 3.0", "a 1.0", "c 0.5 b 1.0"])
def test_corpora_go_on_wherever_they_stand_in_the_blend_and_those_that_are_gone_are_told(parts):
    """Each corpus's documents come in the order of a run without a change, from where it stood."""
    words = parts.split()
    old, new = (
        corpora(("a", 1.0), ("b", 1.0)),
        corpora(*zip(words[::2], map(float, words[1::2]), strict=True)),
    )
    before, after = planner(old, PACKINGS[0]), planner(new, PACKINGS[0])
    first = pieces_of(before, 8)
    waited = tokens_of(waiting_in(before.state()), old)
    assert {name for name, *_ in waited} == {"a", "b"}
    carried = taken_up(before, after)
    names = set(words[::2])
    assert (carried.begun, carried.gone) == (len(names - {"a", "b"}), len({"a", "b"} - names))
    assert tokens_of(list(carried.kept), new) == Counter({k: 1 for k in waited if k[0] in names})
    assert tokens_of(list(carried.lost), old) == Counter({k: 1 for k in waited if k[0] not in names})
    unchanged = planner(old, PACKINGS[0])
    unchanged.load_state(before.state())
    orders = arriving(unchanged, 40, old), arriving(after, 40, new, len(carried.kept))
    rest = orders[1].pop("trained")
    for corpus in (c for c in old if c.name in names):
        seen = tokens_of(first, old) + tokens_of(rest, new)
        mine = {key: count for key, count in seen.items() if key[0] == corpus.name}
        assert set(mine.values()) == {1}
        assert sum(1 for key in mine if key[1] == 0) == sum(LENGTHS[corpus.name])
        # Their order is that of a run without the change.
        pairs = list(zip(*(order[corpus.name] for order in orders), strict=False))
        assert len(pairs) > 10 and all(expected == actual for expected, actual in pairs)


POLICIES = ("split", "split", "truncate", "drop")
RULES = [(window, overlong) for window in (32, 64, 96, 320) for overlong in POLICIES]


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=5, max_size=40),
    rules=st.lists(st.sampled_from(RULES), min_size=2, max_size=4, unique=True),
    stops=st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
def test_with_another_window_what_waited_trains_and_the_next_epoch_begins(lengths, rules, stops):
    lengths = [*lengths, 300, 20]
    parts = [Corpus("lengths", np.array(lengths))]

    def begun(window: int, overlong: str) -> Planner:
        return planner(parts, PACKINGS[2], window=window, overlong=overlong, endless=False)

    planned = begun(*rules[0])
    pieces: list[Piece] = []
    for (window, overlong), stop in zip(rules[1:], stops, strict=False):
        pieces += pieces_of(planned, stop)
        waiting = waiting_in(planned.state())
        after = begun(window, overlong)
        carried = taken_up(planned, after)
        assert tokens_of(list(carried.kept), parts) == tokens_of(waiting, parts) and not carried.lost
        assert all(piece.tokens <= window for piece in carried.kept)
        assert (carried.going_on, carried.restarted) == (0, 1)
        planned = begun(window, overlong)
        planned.load_state(json.loads(json.dumps(after.state())))  # as when it is queued again
    epoch = planned.stream.state()["corpora"][0]["epoch"]
    rest = pieces_of(planned)
    assert set(tokens_of(pieces + rest, parts).values()) == {1}
    if rules[-1][1] == "split":
        assert sum(piece.tokens for piece in rest if piece.epoch == epoch) == sum(lengths)


@pytest.mark.parametrize(("how", "seed"), [({"next_epoch": True}, 5), ({}, 6)])
def test_asked_to_or_with_another_seed_all_corpora_begin_their_next_epoch(how, seed):
    parts = corpora(("a", 1.0), ("b", 1.0))
    before, after = planner(parts, PACKINGS[0]), planner(parts, PACKINGS[0], seed=seed)
    first = tokens_of(pieces_of(before, 3), parts)
    waiting = waiting_in(before.state())
    carried = taken_up(before, after, **how)
    assert (carried.going_on, carried.restarted) == (0, 2)
    rest = pieces_of(after, 40)
    epochs = {piece.epoch for piece in rest if piece not in waiting}
    assert 1 in epochs and 0 not in epochs
    tokens = first + tokens_of(rest, parts)
    assert set(tokens.values()) == {1}


def test_a_state_of_an_older_version_is_not_taken_up():
    before = planner(corpora(("a", 1.0)), PACKINGS[2])
    state = before.state()
    state["stream"] = state["stream"] | {"version": 2}
    with pytest.raises(ValueError, match="of version 2"):
        take_up(before, 3, state)


def test_a_planner_that_has_loaded_a_state_forgets_what_waited_there():
    parts = corpora(("a", 1.0))
    before, after = planner(parts, PACKINGS[0]), planner(parts, PACKINGS[0])
    pieces_of(before, 4)
    assert before.packer.waiting
    after.load_state(before.state())
    taken_up(before, after, next_epoch=True)
    assert not after.packer.waiting
    tokens = tokens_of(pieces_of(after, 20), parts)
    assert set(tokens.values()) == {1}
