"""Which kernel call serves which segment, so that no two segments of a call read the same keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wlb_megatron.sharding.segments import IntArray

Int32Array = npt.NDArray[np.int32]


def calls_of(pieces: IntArray) -> IntArray:
    """int64[k]: the call of each of a rank's segments, given the piece of each.

    Cutting the segments, in local order, wherever a piece comes again keeps every call's rows contiguous:
    pieces 0 1 | 0 2 make calls 0 0 1 1. Where that takes more calls than the largest number of segments of
    one piece, call c takes the c-th segment of every piece instead: pieces 0 1 | 1 2 | 2 (three calls, but
    two suffice) make 0 0 1 0 1.
    """
    count = len(pieces)
    if count == 0:
        return np.empty(0, dtype=np.int64)
    order = np.argsort(pieces, kind="stable")
    repeats = pieces[order][1:] == pieces[order][:-1]
    # Ordinal of each segment among its piece's: distance, in sorted order, from where the piece begins.
    begins = np.flatnonzero(np.concatenate(([True], ~repeats)))
    sizes = np.diff(np.append(begins, count))
    nth = np.empty(count, dtype=np.int64)
    nth[order] = np.arange(count) - np.repeat(begins, sizes)
    earlier = np.full(count, -1, dtype=np.int64)
    earlier[order[1:][repeats]] = order[:-1][repeats]

    bounds = [0]
    for at in np.flatnonzero(earlier >= 0).tolist():
        if earlier[at] >= bounds[-1]:
            bounds.append(at)
    if len(bounds) > nth.max() + 1:
        return nth
    return np.repeat(np.arange(len(bounds)), np.diff([*bounds, count]))
