"""A rank's attention layout, followed by hand, must give every local token its keys, once."""

from itertools import pairwise

import numpy as np
import pytest
from attention_oracle import any_plans
from hypothesis import given, settings
from sharding_oracle import cp_and_lengths, sequences

from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard


def exchanged(plan, rank):
    """The rank's key buffer, when every rank sends its tokens' packed indices instead of keys."""
    own, arrives = plan.packed_index(rank), []
    for sender in range(plan.cp_size):
        exchange = attention_layout(plan, sender).exchange
        before = sum(exchange.send_counts[:rank])
        rows = exchange.send_rows[before : before + exchange.send_counts[rank]]
        arrives.append(plan.packed_index(sender)[rows])
    mine = attention_layout(plan, rank).exchange
    assert tuple(map(len, arrives)) == mine.recv_counts
    # What arrives, backwards behind its own, is where ~0, ~1, .. point.
    return np.concatenate((own, np.concatenate(arrives)[::-1]))[mine.place]


def keys_of(plan, rank):
    """For each local row, the (first, last) runs of packed keys it sees, from the two calls alone."""
    layout = attention_layout(plan, rank)
    own, buffer = plan.packed_index(rank), exchanged(plan, rank)
    seen = [[] for _ in range(layout.tokens)]
    for queries, keys in sequences(layout.diagonals):
        window = own[keys]
        assert len(window) == len(queries) and (np.diff(window) == 1).all()
        for nth, row in enumerate(queries):
            seen[row].append((int(window[0]), int(window[nth])))
    for queries, keys in sequences(layout.rectangles) if layout.rectangles else []:
        window = buffer[keys]
        assert len(window) and (np.diff(window) == 1).all(), "keys are not in document order"
        for query in queries:
            seen[layout.query_rows[query]].append((int(window[0]), int(window[-1])))
    assert len(set(buffer.tolist())) == len(buffer), "two rectangles share keys"
    return layout, seen


def check(plan):
    piece_of = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
    for rank in range(plan.cp_size):
        layout, seen = keys_of(plan, rank)
        for row, packed in enumerate(plan.packed_index(rank).tolist()):
            start = int(plan.piece_starts[piece_of[packed]])
            assert layout.positions[row] == packed - start
            runs = sorted(seen[row])
            assert runs[0][0] == start and runs[-1][1] == packed
            touching = all(left[1] + 1 == right[0] for left, right in pairwise(runs))
            assert touching, "a key is missed or seen twice"


@pytest.mark.parametrize("kind", SHARDINGS)
@settings(deadline=None, max_examples=15)
@given(mix=cp_and_lengths(sizes=(1, 2, 3, 4, 8)))
def test_following_a_layout_gives_every_token_its_keys_once(kind, mix):
    cp, lengths = mix
    check(shard(lengths, cp, kind))


@settings(deadline=None, max_examples=100)
@given(plan=any_plans(cp_sizes=(1, 2, 3, 4)))
def test_any_plan_at_all_has_an_exact_layout(plan):
    check(plan)


def test_every_run_of_earlier_keys_is_one_rectangle_of_all_queries_that_see_it():
    # Rank 1 holds [1, 2) and [4, 6) of a piece of 8: key 0 is seen by three rows, keys 1..3 by the last two.
    plan = ShardPlan(
        np.array([8]), (np.array([[0, 0, 1], [0, 2, 4], [0, 6, 8]]), np.array([[0, 1, 2], [0, 4, 6]]))
    )
    layout = attention_layout(plan, 1)
    assert layout.query_rows.tolist() == [0, 1, 2, 1, 2]
    assert layout.rectangles.cu_seqlens_q.tolist() == [0, 3, 5]
    assert layout.rectangles.cu_seqlens_kv.tolist() == [0, 1, 4]
    assert (layout.rectangles.max_q, layout.rectangles.max_kv) == (3, 3)
    assert attention_layout(shard([8], 1, "per-document"), 0).rectangles is None


def test_more_tokens_than_int32_offsets_reach_are_refused():
    plan = shard([2**31], 2, "per-document")
    with pytest.raises(ValueError, match="lower max_tokens"):
        attention_layout(plan, 0)
