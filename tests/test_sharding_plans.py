"""Per-sequence and per-document plans against rules applied token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from plan_checks import merge_touching, validate
from sharding_oracle import cp_and_lengths, holders, seen_by_rank, slot_rule

from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding.cut import shard, shard_all
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.slots import multiple, padded, padding, slot_bounds

SLOTTED = ("per-sequence", "per-document")
each_slotted = pytest.mark.parametrize("kind", SLOTTED)


def tokens_by_slot(lengths, cp, kind):
    """Slot of every (piece, position), by dealing tokens one at a time."""
    slots = slot_rule(int(np.sum(lengths)), cp)
    if kind == "per-sequence":
        owner = iter([slot for slot, size in enumerate(slots) for _ in range(size)])
        return [[next(owner) for _ in range(d)] for d in lengths]
    dealt, cursor = [], 0
    for d in lengths:
        chunks = [int(d) // (2 * cp)] * (2 * cp)
        for _ in range(int(d) % (2 * cp)):
            chunks[cursor] += 1
            cursor = (cursor + 1) % (2 * cp)
        dealt.append([slot for slot, size in enumerate(chunks) for _ in range(size)])
    return dealt


def ranks_by_hand(lengths, cp, kind):
    """Each rank's tokens as (piece, position), in the order of the rule: segment by segment, merged."""
    dealt = tokens_by_slot(lengths, cp, kind)
    ranks = []
    for rank in range(cp):
        segments = []
        for slot in (rank, 2 * cp - 1 - rank) if cp > 1 else (None,):
            for piece, owners in enumerate(dealt):
                mine = [p for p, s in enumerate(owners) if slot is None or s == slot]
                if not mine:
                    continue
                touching = [one for one in segments if one[0] == piece and one[1][-1] + 1 == mine[0]]
                if touching:
                    touching[0][1].extend(mine)
                else:
                    segments.append((piece, mine))
        ranks.append([(piece, mine[0], mine[-1] + 1) for piece, mine in segments])
    return ranks


@each_slotted
@settings(deadline=None, max_examples=150)
@given(mix=cp_and_lengths())
def test_a_plan_is_what_dealing_tokens_one_by_one_gives_each_to_one_rank_by_the_slot_rule(kind, mix):
    cp, lengths = mix
    plan = shard(lengths, cp, kind)
    assert [[tuple(row) for row in rows.tolist()] for rows in plan.ranks] == ranks_by_hand(lengths, cp, kind)
    validate(plan)
    assert (holders(plan) == 1).all()
    slots = slot_rule(plan.tokens, cp)
    assert plan.tokens_per_rank == tuple(slots[i] + slots[-1 - i] for i in range(cp))
    assert len(set(plan.tokens_per_rank)) == 1


@settings(deadline=None, max_examples=100)
@given(mix=cp_and_lengths())
def test_per_document_work_differs_between_ranks_only_by_the_tokens_that_do_not_divide(mix):
    cp, lengths = mix
    work = seen_by_rank(shard(lengths, cp, "per-document"))
    # A piece's chunks are base or base + 1 long: a rank's two chunks differ from another's by at most 2 rows
    # of at most d keys, and their starts by at most 2CP keys in each row.
    bound = sum(2 * int(d) + 2 * cp * (int(d) // cp + 2) for d in lengths)
    assert max(work) - min(work) <= bound
    assert sum(work) == sum(int(d) * (int(d) + 1) // 2 for d in lengths)


@settings(deadline=None, max_examples=50)
@given(mix=cp_and_lengths())
def test_per_document_work_is_equal_when_all_lengths_divide(mix):
    cp, lengths = mix
    work = seen_by_rank(shard(lengths * 2 * cp, cp, "per-document"))
    assert len(set(work)) == 1


def test_two_documents_show_the_imbalance_of_per_sequence():
    assert seen_by_rank(shard([24, 8], 4, "per-sequence")) == [36, 36, 132, 132]
    assert seen_by_rank(shard([24, 8], 4, "per-document")) == [84, 84, 84, 84]


@each_slotted
def test_many_micro_batches_in_one_pass_equal_one_by_one(kind):
    rng = np.random.default_rng(7)
    batches = []
    for _ in range(20):
        lengths = rng.integers(1, 400, rng.integers(1, 40))
        batches.append(np.append(lengths, padding(int(lengths.sum()), 8)))
    for plan, lengths in zip(shard_all(batches, 4, kind), batches, strict=True):
        alone = shard(lengths, 4, kind)
        assert np.array_equal(plan.lengths, lengths)
        assert all(np.array_equal(a, b) for a, b in zip(plan.ranks, alone.ranks, strict=True))
    plans = shard_all([[9, 7]] * 9000, 4, kind)
    for plan in plans[::100] + plans[-1:]:
        assert all(np.array_equal(a, b) for a, b in zip(plan.ranks, plans[0].ranks, strict=True))


@each_slotted
def test_one_rank_holds_whole_pieces_the_last_one_segment_of_each_document_and_none_of_empty_ones(kind):
    rows = shard([1, 1, 4, 3], 1, kind).ranks[0]
    assert rows.tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 4], [3, 0, 3]]
    pieces = shard([64, 40, 24], 4, kind).ranks[3][:, 0].tolist()
    assert len(pieces) == len(set(pieces))
    assert [rows.tolist() for rows in shard([0, 16, 24, 0, 0], 2, kind).ranks] == [
        [[p + 1, s, e] for p, s, e in rows.tolist()] for rows in shard([16, 24], 2, kind).ranks
    ]
    plan = shard([8] * 12288, 4, kind)
    validate(plan)
    assert plan.tokens_per_rank == (24576,) * 4


# Documents that other systems pad to 2 x CP need no padding here: no token is added, none is lost.
@pytest.mark.parametrize(
    ("lengths", "cp", "tp", "end_padding", "padded_per_document"),
    [
        ([7], 2, 1, 1, 8),
        ([4, 8, 6, 10], 2, 1, 0, 32),
        ([7, 9, 16], 4, 1, 0, 40),
        ([7, 9, 16], 4, 2, 0, 48),
        ([1] * 512, 4, 1, 0, 4096),
    ],
)
def test_odd_lengths_need_padding_at_the_sequence_end_only(lengths, cp, tp, end_padding, padded_per_document):
    pad = padding(sum(lengths), multiple(cp, tp))
    assert pad == end_padding
    pieces = lengths + [pad] * (pad > 0)
    for kind in SLOTTED:
        plan = shard(pieces, cp, kind)
        validate(plan)
        assert plan.tokens == sum(lengths) + end_padding <= padded_per_document
        assert set(plan.tokens_per_rank) == {plan.tokens // cp}


def test_seven_tokens_on_two_ranks_stay_seven_at_positions_from_their_documents_start():
    plan = shard([7, 1], 2, "per-document")
    real = [sum(e - s for piece, s, e in rows.tolist() if piece == 0) for rows in plan.ranks]
    assert sum(real) == 7 and sorted(real) == [3, 4]
    plan = shard([8, 16], 2, "per-document")
    assert plan.positions(0).tolist() == [0, 1, 0, 1, 2, 3, 6, 7, 12, 13, 14, 15]
    assert plan.packed_index(0).tolist() == [0, 1, 8, 9, 10, 11, 6, 7, 20, 21, 22, 23]


@pytest.mark.parametrize(
    ("lengths", "cp", "says"),
    [
        ([3, 4], 4, r"7 tokens .* 4 context-parallel ranks: add a last piece of 1 padding"),
        ([], 2, "0 tokens .* add a last piece of 2 padding"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_cure(lengths, cp, says):
    for kind in SHARDINGS:
        with pytest.raises(ValueError, match=says):
            shard(lengths, cp, kind)


def test_padding_fills_to_the_multiple_by_a_last_piece_and_an_empty_micro_batch_gets_one():
    assert [padding(n, 8) for n in (0, 1, 7, 8, 13)] == [8, 7, 1, 0, 3]
    assert multiple(4, 2, 16) == 128
    assert [padded(lengths, 8).tolist() for lengths in ([7, 4], [8, 16], [])] == [[7, 4, 5], [8, 16], [8]]
    # Slots of several micro-batches come in one array.
    assert slot_bounds([12, 16], 4).tolist() == [
        [0, 2, 4, 6, 8, 9, 10, 11, 12],
        [0, 2, 4, 6, 8, 10, 12, 14, 16],
    ]


def test_touching_rows_merge_at_the_place_of_the_earliest():
    def merged(*rows):
        return [tuple(row) for row in merge_touching(np.array(rows, dtype=np.int64)).tolist()]

    assert merged((0, 0, 2), (1, 0, 1), (0, 2, 4)) == [(0, 0, 4), (1, 0, 1)]
    assert merged((0, 4, 6), (1, 0, 3), (0, 0, 2), (0, 2, 4)) == [(0, 0, 6), (1, 0, 3)]
    assert merged((1, 3, 3), (0, 0, 2), (0, 3, 4)) == [(0, 0, 2), (0, 3, 4)]
    assert merged((0, 0, 2), (1, 2, 4)) == [(0, 0, 2), (1, 2, 4)]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([[(0, 0, 4)], [(0, 5, 8)]], "packed token 4 is held not at all"),
        ([[(0, 0, 5)], [(0, 4, 8)]], "packed token 4 is held twice"),
        ([[(0, 0, 4)], [(0, 4, 7)]], "packed token 7 is held not at all"),
        ([[(0, 0, 4)], [(0, 4, 9)]], r"rank 1: segment \[4, 9\) is empty or outside piece 0"),
        ([[(0, 0, 4)], [(1, 4, 8)]], r"rank 1: a segment names a piece outside 0..0"),
        ([[(0, 0, 4)], [(0, 4, 6), (0, 6, 8)]], "rank 1: segments of one piece touch"),
        ([[(0, 0, 4)], [(0, 4, 4), (0, 4, 8)]], r"rank 1: segment \[4, 4\) is empty"),
    ],
)
def test_a_wrong_plan_is_told_what_is_wrong(ranks, says):
    plan = ShardPlan(np.array([8]), tuple(np.array(rows, dtype=np.int64).reshape(-1, 3) for rows in ranks))
    with pytest.raises(ValueError, match=says):
        validate(plan)
