"""A rank's attention layout, followed by hand, must give every local token its keys, once."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_oracle import cp_and_lengths

from wlb_megatron.config import SHARDINGS
from wlb_megatron.sharding.attention_calls import CAUSAL, FULL, attention_layout
from wlb_megatron.sharding.layout import calls_of
from wlb_megatron.sharding.segments import ShardPlan, merge_touching, validate
from wlb_megatron.sharding.select import shard


def exchanged(plan, rank, split_from):
    """The rank's key buffer, when every rank sends its tokens' packed indices instead of keys."""
    arrives = []
    for sender in range(plan.cp_size):
        exchange = attention_layout(plan, sender, split_from).exchange
        before = sum(exchange.send_counts[:rank])
        rows = exchange.send_rows[before : before + exchange.send_counts[rank]]
        arrives.append(plan.packed_index(sender)[rows])
    mine = attention_layout(plan, rank, split_from).exchange
    assert tuple(map(len, arrives)) == mine.recv_counts
    return np.concatenate(arrives)[mine.place]


def keys_of(plan, rank, split_from):
    """For each local row, how many keys of its piece it sees, and whether each is seen once: from calls alone."""
    layout = attention_layout(plan, rank, split_from)
    own, buffer = plan.packed_index(rank), exchanged(plan, rank, split_from)
    seen = [[] for _ in range(layout.tokens)]  # (first, last) runs of packed keys
    for call in layout.calls:
        keys = buffer if call.gathered else own
        begins = call.kv_starts[:-1].tolist()
        assert len(set(begins)) == len(begins), "two segments of a call share keys"
        sizes = zip(np.diff(call.cu_seqlens_q).tolist(), np.diff(call.cu_seqlens_kv).tolist(), strict=True)
        for one, (queries, width) in enumerate(sizes):
            window = keys[begins[one] : begins[one] + width]
            assert len(window) == width and (np.diff(window) == 1).all(), "keys are not in document order"
            first_row = call.rows[0] + int(call.q_starts[one])
            for nth in range(queries):
                last = width - 1 if call.mask == FULL else width - queries + nth
                assert call.mask != CAUSAL or width == queries
                seen[first_row + nth].append((int(window[0]), int(window[last])))
    return layout, seen


def check(plan, split_from):
    piece_of = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
    for rank in range(plan.cp_size):
        layout, seen = keys_of(plan, rank, split_from)
        for row, packed in enumerate(plan.packed_index(rank).tolist()):
            start = int(plan.piece_starts[piece_of[packed]])
            assert layout.positions[row] == packed - start
            runs = sorted(seen[row])
            assert runs[0][0] == start and runs[-1][1] == packed
            assert all(left[1] + 1 == right[0] for left, right in pairwise(runs)), (
                "a key is missed or seen twice"
            )


@pytest.mark.parametrize("split_from", [0, 4, 10**9])
@pytest.mark.parametrize("kind", SHARDINGS)
@settings(deadline=None, max_examples=15)
@given(mix=cp_and_lengths(sizes=(1, 2, 3, 4, 8)))
def test_following_a_layout_gives_every_token_its_keys_once(kind, split_from, mix):
    cp, lengths = mix
    check(shard(lengths, cp, kind), split_from)


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


@settings(deadline=None, max_examples=100)
@given(plan=any_plan(), split_from=st.sampled_from([0, 3, 10**9]))
def test_any_plan_at_all_has_an_exact_layout(plan, split_from):
    validate(plan)
    check(plan, split_from)


def test_calls_are_cut_where_a_piece_comes_again_unless_that_takes_more_calls():
    assert calls_of(np.array([0, 1, 0, 2])).tolist() == [0, 0, 1, 1]
    assert calls_of(np.array([0, 1, 1, 2, 2])).tolist() == [0, 0, 1, 0, 1]
    assert calls_of(np.array([3, 3, 3])).tolist() == [0, 1, 2]
    assert calls_of(np.array([], dtype=np.int64)).tolist() == []


def test_more_tokens_than_int32_offsets_reach_are_refused():
    plan = shard([2**31], 2, "per-document")
    with pytest.raises(ValueError, match="lower max_tokens"):
        attention_layout(plan, 0)
