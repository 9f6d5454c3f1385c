"""Let Transformer Engine's own layers run right on FlashAttention-4, so that benchmarks can compare with them.

Transformer Engine (2.20.2) tells an unbounded side of a window as -1. FlashAttention-4 (4.0.0b36) takes None for that,
and a single -1 as a bound: of causal's (-1, 0) no key is left, and attention returns zeros without an error
(TransformerEngine issue 3528). The plugin passes None, and needs none of this.
"""

from __future__ import annotations

import os
from typing import Any

ASKED = "BENCH_CORRECT_FA4_WINDOWS"
"""Environment variable by which a benchmark asks for it in the processes that it starts."""


def correct_windows() -> None:
    """Take each negative bound as none, in every later call of FlashAttention-4 in this process."""
    from flash_attn.cute import interface

    resolve = interface._resolve_causal_local_window
    if getattr(resolve, "corrected", False):
        return

    def resolved(causal: bool, left: int | None, right: int | None, *more: Any) -> Any:
        return resolve(causal, *(None if n is None or n < 0 else n for n in (left, right)), *more)

    resolved.corrected = True  # type: ignore[attr-defined]
    interface._resolve_causal_local_window = resolved


def correct_if_asked() -> None:
    """For a process that a benchmark started."""
    if os.environ.get(ASKED) == "1":
        correct_windows()
