"""A rank's layout, followed by hand, must give every local token its document, position and keys."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_oracle import cp_and_lengths

from wlb_megatron.sharding.layout import calls_of, rank_layout
from wlb_megatron.sharding.segments import ShardPlan, merge_touching, validate
from wlb_megatron.sharding.select import shard


def follow(plan, rank):
    """{local row: (first, last) packed index of its keys}, from the layout and a gathered buffer alone."""
    layout = rank_layout(plan, rank)
    # Every rank sends its tokens' packed indices instead of keys.
    gathered = np.concatenate([rank_layout(plan, r).packed_index for r in range(plan.cp_size)])
    buffer = gathered[layout.gather_order]
    keys = {}
    for call in layout.calls:
        rows = np.arange(*call.q_index) if isinstance(call.q_index, tuple) else call.q_index
        assert call.cu_seqlens_q[0] == call.cu_seqlens_kv[0] == 0
        assert call.cu_seqlens_q[-1] == len(rows) and call.kv_starts[-1] == plan.tokens
        assert len(set(call.kv_starts[:-1].tolist())) == len(call.kv_starts) - 1, "two segments share keys"
        assert (
            call.max_q == np.diff(call.cu_seqlens_q).max()
            and call.max_kv == np.diff(call.cu_seqlens_kv).max()
        )
        for one in range(len(call.cu_seqlens_q) - 1):
            queries = rows[call.cu_seqlens_q[one] : call.cu_seqlens_q[one + 1]]
            seen = int(call.cu_seqlens_kv[one + 1] - call.cu_seqlens_kv[one])
            start = int(call.kv_starts[one])
            window = buffer[start : start + seen]
            assert (np.diff(window) == 1).all(), "keys are not in document order"
            for nth, row in enumerate(queries.tolist()):
                assert row not in keys, "a row is computed twice"
                keys[row] = int(window[0]), int(window[seen - len(queries) + nth])  # causal, bottom-right
    return layout, keys


def check(plan):
    piece_of = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
    for rank in range(plan.cp_size):
        layout, keys = follow(plan, rank)
        assert sorted(keys) == list(range(plan.tokens_per_rank[rank]))
        for row, packed in enumerate(layout.packed_index.tolist()):
            start = int(plan.piece_starts[piece_of[packed]])
            assert layout.positions[row] == packed - start
            assert keys[row] == (start, packed)
        most = max(np.bincount(plan.ranks[rank][:, 0]), default=0)
        assert len(layout.calls) == most


@pytest.mark.parametrize("kind", ["per-sequence", "per-document"])
@settings(deadline=None, max_examples=40)
@given(mix=cp_and_lengths(sizes=(1, 2, 3, 4, 8)))
def test_following_a_layout_gives_every_token_its_document_position_and_keys(kind, mix):
    cp, lengths = mix
    check(shard(lengths, cp, kind))


@st.composite
def any_plan(draw):
    """Pieces cut anywhere, their segments dealt anywhere in any order: many of a document on one rank."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    cp = draw(st.integers(1, 4))
    rows = []
    for piece, d in enumerate(lengths):
        cuts = sorted({0, d, *draw(st.lists(st.integers(0, d), max_size=8))})
        rows += [(piece, a, b) for a, b in pairwise(cuts)]
    rows = draw(st.permutations(rows))
    owners = draw(st.lists(st.integers(0, cp - 1), min_size=len(rows), max_size=len(rows)))
    ranks = [[row for row, owner in zip(rows, owners, strict=True) if owner == r] for r in range(cp)]
    merged = tuple(merge_touching(np.array(one, dtype=np.int64).reshape(-1, 3)) for one in ranks)
    return ShardPlan(np.array(lengths, dtype=np.int64), merged)


@settings(deadline=None, max_examples=200)
@given(plan=any_plan())
def test_any_plan_at_all_has_an_exact_layout(plan):
    validate(plan)
    check(plan)


def test_the_queries_of_slotted_plans_are_slices_never_copies():
    lengths = np.array([500, 3, 1, 90, 2, 7, 1, 160, 4])
    for kind in ("per-sequence", "per-document"):
        plan = shard(lengths, 4, kind)
        for rank in range(4):
            assert all(isinstance(call.q_index, tuple) for call in rank_layout(plan, rank).calls)


def test_calls_are_cut_where_a_piece_comes_again_unless_that_takes_more_calls():
    assert calls_of(np.array([0, 1, 0, 2])).tolist() == [0, 0, 1, 1]
    assert calls_of(np.array([0, 1, 1, 2, 2])).tolist() == [0, 0, 1, 0, 1]
    assert calls_of(np.array([3, 3, 3])).tolist() == [0, 1, 2]
    assert calls_of(np.array([], dtype=np.int64)).tolist() == []


def test_more_tokens_than_int32_offsets_reach_are_refused():
    plan = shard([2**31], 2, "per-document")
    with pytest.raises(ValueError, match="lower max_tokens"):
        rank_layout(plan, 0)
