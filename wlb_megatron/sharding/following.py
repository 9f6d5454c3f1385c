"""Finds each token's next token in its document. Multi-token prediction shifts inputs and labels by it."""

from __future__ import annotations

import numpy as np

from wlb_megatron.sharding.segments import IntArray, ShardPlan


def following(plan: ShardPlan) -> IntArray:
    """int64[T]: for each of the T tokens, listed rank by rank, the index in that list of the piece's next token.

    The last token of a piece gets T.

    Example: pieces of 4 and 2 tokens, rank 0 holding tokens 0, 3 of the first and 0 of the second, rank 1 the others.
    The list is a0 a3 b0 | a1 a2 b1, and the next tokens are at 3, 6, 5 | 4, 1, 6.
    """
    held = np.concatenate([plan.packed_index(rank) for rank in range(plan.cp_size)])
    place = np.empty(plan.tokens + 1, dtype=np.int64)
    place[held] = np.arange(plan.tokens)
    place[plan.tokens] = plan.tokens
    after = place[1:].copy()
    after[plan.piece_starts[1:][plan.lengths > 0] - 1] = plan.tokens
    return after[held]
