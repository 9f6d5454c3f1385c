"""merge.merge_into in one kernel: each of its tensors is read or written once."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


@triton.jit
def _merge(out, lse, part, part_lse, rows, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    mine = tl.load(lse + row, inside, float("-inf"))
    other = tl.load(part_lse + row, inside, float("-inf"))
    top = tl.maximum(tl.maximum(mine, other), -1.0e30)  # finite, so that -inf minus -inf does not occur
    a, b = tl.exp(mine - top), tl.exp(other - top)
    total = tl.maximum(a + b, 1.0e-37)
    tl.store(lse + row, top + tl.log(a + b), inside)
    column = tl.arange(0, PADDED)
    at = row[:, None] * DIM + column[None, :]
    valid = inside[:, None] & (column < DIM)[None, :]
    x = tl.load(out + at, valid, 0.0).to(tl.float32)
    y = tl.load(part + at, valid, 0.0).to(tl.float32)
    merged = x * (a / total)[:, None] + y * (b / total)[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), valid)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """See merge.merge_into. All tensors contiguous, lse fp32."""
    rows, dim = lse.numel(), out.shape[-1]
    block = 8
    # One warp a program: several would each load lse, and one could store its new value before another loads
    # the old (seen: a tenth of the output wrong).
    _merge[(triton.cdiv(rows, block),)](
        out, lse, part, part_lse, rows, dim, triton.next_power_of_2(dim), block, num_warps=1
    )
