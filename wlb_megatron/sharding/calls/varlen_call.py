"""One variable-length attention call: the sequences and masks that the kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb_megatron.sharding.segments import IntArray

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class AttentionCall:
    """One variable-length call over b sequences; each sequence's queries and keys are contiguous.

    cu_seqlens_q, cu_seqlens_kv: int32[b + 1], in tokens. max_q, max_kv: the longest sequence's queries and keys, in
    tokens.
    """

    cu_seqlens_q: Int32Array
    cu_seqlens_kv: Int32Array
    max_q: int
    max_kv: int

    @property
    def equal(self) -> tuple[int, int, int] | None:
        """(sequences, queries of each, keys of each) if all sequences have the same sizes, else None."""
        queries, keys = np.diff(self.cu_seqlens_q), np.diff(self.cu_seqlens_kv)
        if not len(queries) or (queries != self.max_q).any() or (keys != self.max_kv).any():
            return None
        return len(queries), self.max_q, self.max_kv


def varlen_call(queries: IntArray, keys: IntArray) -> AttentionCall:
    """The call over b sequences. queries, keys: int64[b] each, tokens per sequence."""
    return AttentionCall(
        _bounds(queries), _bounds(keys), int(queries.max(initial=0)), int(keys.max(initial=0))
    )


def _bounds(sizes: IntArray) -> Int32Array:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
