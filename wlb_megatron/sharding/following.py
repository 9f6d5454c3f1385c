"""Finds each token's next token in its document. Multi-token prediction shifts inputs and labels by it."""

from __future__ import annotations

import numpy as np

from wlb_megatron.sharding.segments import IntArray, ShardPlan


def following(plan: ShardPlan) -> IntArray:
    """int64[T]: for the tokens of rank 0, rank 1 .. end to end, the index there of the token that follows in the same
    piece; T after a piece's last.

    Pieces of 4 and 2 tokens, rank 0 holding tokens 0, 3 of the first and 0 of the second, rank 1 the others: end to
    end a0 a3 b0 | a1 a2 b1, and what follows is at 3, 6, 5 | 4, 1, 6.
    """
    held = np.concatenate([plan.packed_index(rank) for rank in range(plan.cp_size)])
    place = np.empty(plan.tokens + 1, dtype=np.int64)
    place[held] = np.arange(plan.tokens)
    place[plan.tokens] = plan.tokens
    after = place[1:].copy()
    after[plan.piece_starts[1:][plan.lengths > 0] - 1] = plan.tokens
    return after[held]
