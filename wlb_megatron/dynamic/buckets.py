"""Lengths gathered into a few buckets, so that a solver counts documents instead of naming them (FlexSP)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Buckets:
    """Documents by length, each counted as the longest of its bucket.

    tokens: int64[k], ascending. members: indices of the documents of each bucket, longest first.
    error: tokens counted too many, as a share of all.
    """

    tokens: IntArray
    members: tuple[tuple[int, ...], ...]
    error: float


def bucket(lengths: npt.ArrayLike, count: int = 16) -> Buckets:
    """At most `count` buckets with the least sum of (bucket's longest - length), by dynamic programming.

    Lengths 1 2 9 10, two buckets: [1 2] [9 10], two tokens too many of 22. Raises ValueError without a document
    or a bucket.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if not len(tokens) or count < 1:
        raise ValueError(
            f"cannot gather {len(tokens)} documents into {count} buckets: give at least one of each"
        )
    values, occurrences = np.unique(tokens, return_counts=True)
    values, occurrences = _thin(values, occurrences)
    n = len(values)
    many = np.concatenate(([0], np.cumsum(occurrences)))
    total = np.concatenate(([0], np.cumsum(values * occurrences)))
    # best[j]: least excess of values 0 .. j - 1 in the buckets so far; a bucket of values i .. j - 1 counts each
    # as values[j - 1].
    ends = np.arange(1, n + 1)
    best = values * many[1:] - total[1:]
    best = np.concatenate(([0], best))
    begins = [np.zeros(n + 1, dtype=np.int64)]
    for _ in range(1, min(count, n)):
        new, begin = best.copy(), np.arange(n + 1)
        for j in ends.tolist():
            excess = best[:j] + values[j - 1] * (many[j] - many[:j]) - (total[j] - total[:j])
            at = int(np.argmin(excess))
            new[j], begin[j] = excess[at], at
        best = new
        begins.append(begin)
    cuts, at = [n], n
    for begin in reversed(begins):
        at = int(begin[at])
        if at < cuts[-1]:
            cuts.append(at)
    cuts.reverse()
    tops = values[np.array(cuts[1:]) - 1]
    where = np.searchsorted(tops, tokens)
    order = np.lexsort((np.arange(len(tokens)), -tokens))
    members = tuple(tuple(order[where[order] == k].tolist()) for k in range(len(tops)))
    return Buckets(tops, members, float((tops[where] - tokens).sum() / max(int(tokens.sum()), 1)))


_FINE = 512
"""Lengths told apart at most; more are first rounded up to quantiles of the tokens."""


def _thin(values: IntArray, occurrences: IntArray) -> tuple[IntArray, IntArray]:
    """At most about _FINE of the values, each of the others counted as the next larger one kept."""
    if len(values) <= _FINE:
        return values, occurrences
    # Half of those kept are spread over the values, half over the tokens: both tails are told apart.
    share = np.cumsum(values * occurrences)
    marks = np.linspace(0, share[-1], _FINE // 2)
    kept = np.union1d(np.searchsorted(share, marks), np.linspace(0, len(values) - 1, _FINE // 2).astype(int))
    kept = np.union1d(np.minimum(kept, len(values) - 1), [len(values) - 1])
    starts = np.concatenate(([0], kept[:-1] + 1))
    return values[kept], np.add.reduceat(occurrences, starts)
