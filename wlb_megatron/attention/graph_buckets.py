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
