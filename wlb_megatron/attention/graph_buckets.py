"""Which shapes share a kernel graph in Transformer Engine, and which of them a run can meet.

cuDNN's attention runs from a graph that is built on first use, 0.1 s or so, and kept by its sizes. Transformer Engine
rounds the sizes of packed sequences up, so that one graph serves a range of them (its get_max_batch_size and
get_max_tokens, version 2.20). Each of the two threads of a step keeps graphs of its own: forward runs in the main
thread, backward in autograd's, and recomputed forwards there, too.
"""

from __future__ import annotations

from typing import NamedTuple


class Bucket(NamedTuple):
    """Sizes that a graph serves: sequences, query rows and key rows, each up to this many."""

    sequences: int
    queries: int
    keys: int


def bucket(sequences: int, queries: int, keys: int) -> Bucket:
    """The graph that serves a call of these sizes: 40 sequences of 5,000 rows run in the graph of 64 of 8,192."""
    return Bucket(_sequences(sequences), rows(queries), rows(keys))


def rows(tokens: int) -> int:
    """1,024; the next power of two up to 32,768; then the next multiple of that."""
    return max(1024, _power(tokens)) if tokens <= 32768 else -(-tokens // 32768) * 32768


def _sequences(count: int) -> int:
    return max(32, _power(count)) if count <= 512 else -(-count // 512) * 512


def _power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def levels(most: int) -> list[int]:
    """Row counts that stand for every bucket of 1 to `most` rows, ascending: of 5,000 are 1024 2048 4096 5000."""
    found = [min(1024, most)]
    while found[-1] < most:
        found.append(min(rows(found[-1] + 1), most))
    return found


Warmable = tuple[bool, int | None, Bucket]
"""Causal or not, window, sizes: what a graph is kept by, beside the shape of the heads."""


def foreseen(
    tokens: int, cp_size: int, sequences: int, window: int | None, full: bool = True
) -> list[Warmable]:
    """Every graph that micro-batches of up to `tokens` tokens can need on a rank.

    sequences: segments that a rank's call can have. window: of the model's windowed layers. full: whether any layer
    sees whole documents. A rank holds an even share of the tokens; its rectangles' queries come at most twice (a
    document cut in causal pairs has two segments on a rank), their keys are those of the micro-batch at most.
    """
    share = -(-tokens // cp_size)
    counts = _counts(sequences)
    found: list[Warmable] = []
    if full:
        found += [(True, None, Bucket(b, t, t)) for b in counts for t in levels(share)]
        if cp_size > 1:
            queries, keys = levels(2 * share), levels(tokens)
            found += [(False, None, Bucket(b, q, k)) for b in counts for q in queries for k in keys]
    if window is not None:
        # A segment sees its own keys and at most a window more, all its own where nothing is cut.
        found += [
            (True, window, Bucket(b, t, k))
            for b in counts
            for t in levels(share)
            for k in levels(min(tokens, share + sequences * window))
            if k >= t and (cp_size > 1 or rows(k) == rows(t))
        ]
    return found


def _counts(most: int) -> list[int]:
    found = [32]
    while found[-1] < most:
        found.append(_sequences(found[-1] + 1))
    return found
