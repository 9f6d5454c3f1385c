"""Hashes how micro-batches are cut, so that ranks can check that they hold the segments that others expect."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from wlb_megatron.sharding.segments import ShardPlan


def digest_of_cuts(shards: Iterable[ShardPlan]) -> bytes:
    """An 8-byte hash of every segment of every rank, the cached keys, and the number of kernel calls."""
    digest = hashlib.blake2b(digest_size=8)
    for shard in shards:
        arrays = [shard.lengths, shard.prefixes, *shard.ranks]
        if shard.chunks is not None:
            arrays += [shard.chunks.rests, *shard.chunks.cached]
        sizes = [int(shard.one_call), len(shard.ranks), *map(len, arrays)]
        for array in (np.array(sizes), *arrays):
            digest.update(np.ascontiguousarray(array, dtype=np.int64))
    return digest.digest()
