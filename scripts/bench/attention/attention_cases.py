"""What attention is checked with: heads, masks and documents. Needs neither Transformer Engine nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LENGTHS = [3001, 1, 700, 2, 15, 129, 1500, 64, 257, 16, 400]
ALONE = [4096]
"""A document that fills the window: its calls are of equal sequences."""
CROWD = [3] * 600 + [500]
"""More sequences than FlashAttention-4 looks up in the usual way."""
CROWDED = ("head dim 128", "window 127", "deterministic, head dim 128")


WITH_NANS = ("head dim 128", "window 127", "MLA 192 / 128", "sink learnable")


@dataclass(frozen=True)
class Case:
    name: str
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    v_dim: int | None = None
    window: int | None = None
    softmax: str = "vanilla"
    deterministic: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def te_options(self) -> dict[str, Any]:
        """What Transformer Engine's own module calls the same."""
        options: dict[str, Any] = {"softmax_type": self.softmax}
        if self.window is not None:
            options["window_size"] = (self.window, 0)
        return options


CASES = (
    *(Case(f"head dim {dim}", dim=dim) for dim in (64, 96, 128, 192, 256)),
    Case("MHA", kv_heads=8),
    Case("MQA", kv_heads=1),
    Case("MLA 192 / 128", heads=8, kv_heads=8, dim=192, v_dim=128),
    *(Case(f"window {window}", window=window) for window in (1, 127, 1024, 100_000)),
    Case("window 127, head dim 64", dim=64, window=127),
    Case("sink off-by-one", softmax="off-by-one"),
    Case("sink learnable", softmax="learnable"),
    Case("sink and window 127, head dim 64", dim=64, window=127, softmax="learnable"),
    *(Case(f"deterministic, head dim {dim}", dim=dim, deterministic=True) for dim in (64, 128)),
    Case("deterministic, window 127", window=127, deterministic=True),
    Case("deterministic, MLA 192 / 128", kv_heads=8, dim=192, v_dim=128, deterministic=True),
    Case("fp16", dtype=torch.float16),
    Case("fp16, head dim 64, MHA", kv_heads=8, dim=64, dtype=torch.float16),
)
