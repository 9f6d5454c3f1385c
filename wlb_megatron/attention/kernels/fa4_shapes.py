"""Head sizes that FlashAttention-4 takes without padding. It imports nothing, so it works without a GPU."""

from __future__ import annotations


def narrow_values(dim: int, v_dim: int) -> bool:
    """Whether FlashAttention-4 takes values narrower than keys without padding.

    Only DeepSeek's sizes were tested. Other values are padded with zeros.
    """
    return (dim, v_dim) == (192, 128)
