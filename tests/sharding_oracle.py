"""What the sharding tests share: document mixes that break things, and a brute-force reading of plans."""

import numpy as np
from hypothesis import strategies as st

from wlb_megatron.sharding.alignment import padding
from wlb_megatron.sharding.segments import ShardPlan


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
