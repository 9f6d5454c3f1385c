"""One variable-length attention call: the sequences and masks that the kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb_megatron.sharding.segments import IntArray

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class AttentionCall:
    """One variable-length call over b sequences, queries and keys of each side by side.

    cu_seqlens_q, cu_seqlens_kv: int32[b + 1]. max_q, max_kv: the longest, in tokens.
    """

    cu_seqlens_q: Int32Array
    cu_seqlens_kv: Int32Array
    max_q: int
    max_kv: int

    @property
    def equal(self) -> tuple[int, int, int] | None:
        """Sequences, and the queries and keys that each of them has, where all have as many."""
        queries, keys = np.diff(self.cu_seqlens_q), np.diff(self.cu_seqlens_kv)
        if not len(queries) or (queries != self.max_q).any() or (keys != self.max_kv).any():
            return None
        return len(queries), self.max_q, self.max_kv


def varlen_call(queries: IntArray, keys: IntArray) -> AttentionCall:
    """The call over sequences of these many queries and keys, int64[b] each."""
    return AttentionCall(
        _bounds(queries), _bounds(keys), int(queries.max(initial=0)), int(keys.max(initial=0))
    )


def _bounds(sizes: IntArray) -> Int32Array:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
