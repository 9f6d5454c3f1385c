"""Alignment arithmetic: how much padding a micro-batch gets, and how many tokens each slot and rank holds.

A micro-batch fills 2 * CP slots. Context-parallel rank i holds slots i and 2 * CP - 1 - i, so under a causal mask
every rank has an early and a late share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def multiple(cp_size: int, tp_size: int = 1, rows: int = 1) -> int:
    """The number of which a micro-batch's tokens must be a multiple: CP x TP x rows.

    A rank's GEMMs need `rows` (1; 16 with FP8, 32 with MXFP8). TP counts because sequence parallelism divides a
    context-parallel rank's tokens once more.
    """
    return cp_size * tp_size * rows


def padding(tokens: int, multiple: int) -> int:
    """Padding tokens that make `tokens` a multiple of `multiple`: 13 to a multiple of 8 needs 3.

    An empty micro-batch gets one whole multiple, so that every rank has a token.
    """
    return multiple if tokens == 0 else -tokens % multiple


def padded(lengths: Sequence[int] | IntArray, multiple: int) -> IntArray:
    """int64[n]: the lengths (tokens), with the padding last if their sum needs any.

    Example: [7, 4] to a multiple of 8 is [7, 4, 5].
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    missing = padding(int(tokens.sum()), multiple)
    return np.append(tokens, missing) if missing else tokens


def slot_bounds(tokens: npt.ArrayLike, cp_size: int) -> IntArray:
    """int64[..., 2 * CP + 1]: where each slot starts in a sequence of `tokens` tokens; the last entry is the end.

    Slot s holds tokens // 2CP, plus one if s < tokens mod 2CP (which is 0 or CP). Example: 12 tokens, CP=4: slots of
    2 2 2 2 1 1 1 1 give [0, 2, 4, 6, 8, 9, 10, 11, 12]; ranks (0, 7), (1, 6), (2, 5), (3, 4) hold 3 each.

    Raises ValueError if tokens is not a positive multiple of CP.
    """
    totals = np.asarray(tokens, dtype=np.int64)
    is_wrong = (totals <= 0) | (totals % cp_size != 0)
    if is_wrong.any():
        bad = int(totals[is_wrong][0])
        raise ValueError(
            f"{bad} tokens cannot be cut evenly over {cp_size} context-parallel ranks: "
            f"add a last piece of {padding(max(bad, 0), cp_size)} padding tokens"
        )
    base, extra = np.divmod(totals[..., None], 2 * cp_size)
    slots = np.arange(2 * cp_size + 1)
    return slots * base + np.minimum(slots, extra)
