"""Lengths gathered into a few buckets, so that a solver counts documents instead of naming them (FlexSP)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Buckets:
    """Documents by length, each counted as the mean of its bucket, rounded up: their tokens are right in sum.

    tokens: int64[k], ascending. members: indices of the documents of each bucket, longest first.
    """

    tokens: IntArray
    members: tuple[tuple[int, ...], ...]


def bucket(lengths: npt.ArrayLike, count: int = 16) -> Buckets:
    """At most `count` buckets, by dynamic programming, with the least sum of (longest of the bucket - length).

    FlexSP (arXiv 2412.01523) bounds its buckets so, 16 for each micro-batch of consecutive documents of a sorted
    batch, and counts the longest. Lengths 1 2 9 10, two buckets: [1 2] [9 10], which is 2 tokens of 22 too many,
    counted as 2 and 10.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    values, occurrences = _thin(*np.unique(tokens, return_counts=True))
    n = len(values)
    running_count, total = (
        np.concatenate(([0], np.cumsum(row))) for row in (occurrences, values * occurrences)
    )
    best_error = np.full(n + 1, np.iinfo(np.int64).max // 2)
    best_error[0] = 0
    begins = []
    for _ in range(min(count, n)):
        # new[j]: least error of values 0 .. j - 1 in one bucket more, whose longest is values[j - 1].
        new_error, begin = best_error.copy(), np.arange(n + 1)
        for j in range(1, n + 1):
            error = (
                best_error[:j]
                + values[j - 1] * (running_count[j] - running_count[:j])
                - (total[j] - total[:j])
            )
            best_index = int(np.argmin(error))
            if error[best_index] < new_error[j]:
                new_error[j], begin[j] = error[best_index], best_index
        best_error = new_error
        begins.append(begin)
    cuts, best_index = [n], n
    for begin in reversed(begins):
        best_index = int(begin[best_index])
        if best_index < cuts[-1]:
            cuts.append(best_index)
    cuts.reverse()
    where = np.searchsorted(values[np.array(cuts[1:]) - 1], tokens)
    order = np.lexsort((np.arange(len(tokens)), -tokens))
    members = tuple(tuple(order[where[order] == k].tolist()) for k in range(len(cuts) - 1))
    mean_tokens = np.array(
        [-(-int(tokens[list(bucket_members)].sum()) // len(bucket_members)) for bucket_members in members]
    )
    return Buckets(mean_tokens, members)


_FINE = 512
"""Lengths told apart at most; more are first rounded up to quantiles of the tokens."""


def _thin(values: IntArray, occurrences: IntArray) -> tuple[IntArray, IntArray]:
    """At most about _FINE of the values, each of the others counted as the next larger one kept."""
    if len(values) <= _FINE:
        return values, occurrences
    # Half of those kept are spread over the values, half over the tokens: both tails are told apart.
    share = np.cumsum(values * occurrences)
    marks = np.linspace(0, share[-1], _FINE // 2)
    kept_index = np.union1d(
        np.searchsorted(share, marks), np.linspace(0, len(values) - 1, _FINE // 2).astype(int)
    )
    kept_index = np.union1d(np.minimum(kept_index, len(values) - 1), [len(values) - 1])
    starts = np.concatenate(([0], kept_index[:-1] + 1))
    return values[kept_index], np.add.reduceat(occurrences, starts)
