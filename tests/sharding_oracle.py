"""What the sharding tests share: document mixes that break things, and a brute-force reading of plans."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import predict_all
from wlb_megatron.sharding.hybrid import hybrid
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.slots import PieceList, padding


def mix(lengths, cp_size, table, prefixes=None):
    """Hybrid sharding's plan of one micro-batch."""
    return hybrid(PieceList.of([lengths], None if prefixes is None else [prefixes]), cp_size, table)[0]


@st.composite
def cp_and_lengths(draw, sizes=(1, 2, 3, 4, 5, 6, 7, 8)):
    """(cp_size, lengths): awkward lengths, one document alone, or hundreds of tiny ones; padded."""
    cp = draw(st.sampled_from(sizes))
    awkward = st.sampled_from([1, 2, max(1, 2 * cp - 1), 2 * cp, 2 * cp + 1, 4 * cp])
    tiny = st.tuples(st.integers(100, 400), st.integers(0, 99)).map(
        lambda many: np.random.default_rng(many[1]).integers(1, 6, many[0]).tolist()
    )
    lengths = draw(
        st.one_of(
            st.lists(st.one_of(awkward, st.integers(1, 300)), min_size=1, max_size=24),
            st.lists(st.integers(1, 2000), min_size=1, max_size=1),
            tiny,
        )
    )
    pad = padding(sum(lengths), cp * draw(st.sampled_from([1, 2, 16])))
    return cp, np.array(lengths + [pad] * (pad > 0), dtype=np.int64)


def seen_by_rank(plan: ShardPlan) -> list[int]:
    """Query-key pairs each rank computes, counted token by token."""
    return [sum(position + 1 for position in plan.positions(rank).tolist()) for rank in range(plan.cp_size)]


def holders(plan: ShardPlan) -> np.ndarray:
    """How often each packed token is held, over all ranks."""
    held = np.zeros(plan.tokens, dtype=np.int64)
    for rank in range(plan.cp_size):
        np.add.at(held, plan.packed_index(rank), 1)
    return held


def slot_rule(tokens: int, cp: int) -> list[int]:
    """Tokens of each of the 2 * CP slots, as the rule says them: one by one."""
    sizes = [tokens // (2 * cp)] * (2 * cp)
    for slot in range(tokens % (2 * cp)):
        sizes[slot] += 1
    return sizes


def sequences(call):
    """(queries, keys) of each sequence, as ranges of rows."""
    bounds = zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_kv.tolist()), strict=True)
    return [(range(*q), slice(*k)) for q, k in bounds]


def predict(plan, table):
    """int64[cp]: nanoseconds of one plan's ranks."""
    return predict_all([plan], table)[0]


def by_the_calls(plan, rank, table):
    """The rank's time, from the executor's own layout, call by call, all tiles as busy as in a full device."""
    layout = attention_layout(plan, rank)

    def shapes(call):
        return (np.diff(bounds).astype(np.int64) for bounds in (call.cu_seqlens_q, call.cu_seqlens_kv))

    queries, keys = shapes(layout.diagonals)
    assert np.array_equal(queries, keys)
    diagonal = table.call + table.diagonal_ns(queries).sum()
    rectangles = 0.0
    if layout.rectangles:
        rectangles = table.call + table.second_call + table.rectangle_ns(*shapes(layout.rectangles)).sum()
    remote = sum(layout.exchange.recv_counts)
    exchange = table.exchange + table.exchange_row * remote if remote else 0.0
    return diagonal + rectangles + max(0.0, exchange - diagonal)
