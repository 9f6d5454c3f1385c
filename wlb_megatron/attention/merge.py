"""Merges attention over two sets of keys, given each one's log-sum-exp (as ring attention does)."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge `part` into `out`, in place. out, part: [t, heads, dim]; lse, part_lse: [t, heads], fp32 or more.

    Rows whose log-sum-exp is -inf weigh nothing. The weighted sum is made in the log-sum-exp's type and rounded
    once. Source: exp(lse) is each part's softmax denominator.
    """
    if out.is_cuda:
        from wlb_megatron.attention.merge_triton import merge_into as fused

        fused(out, lse, part, part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    weight = torch.exp(part_lse - total).nan_to_num_(0.0).unsqueeze(-1)  # -inf and -inf: neither has a key
    kept = torch.exp(lse - total).nan_to_num_(0.0).unsqueeze(-1)
    out.copy_(kept * out + weight * part)
    lse.copy_(total)
