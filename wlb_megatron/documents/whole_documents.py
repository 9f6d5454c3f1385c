"""How long a document may be to train whole: the window, or with --wlb-overlong chunk what the run can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bound(NamedTuple):
    """A limit on the tokens of a document that trains whole, and a description of what sets it."""

    tokens: int
    of: str


def longest_whole(
    overlong: str, window: int, windows: int, bounds: Sequence[Bound] = (), memory: Bound | None = None
) -> tuple[int, str]:
    """Tokens of the longest document that is not split, and one line that says why ("" unless overlong is chunk).

    window: tokens. windows: that a data-parallel rank trains in its smallest global batch. A document trains on one
    rank in one iteration, so this limits its length. bounds: further limits. memory: the GPU's limit, None if
    unknown. Example: window 8, 4 windows, a bound of 20 tokens: 20.
    """
    if overlong != "chunk":
        return window, ""
    share = Bound(windows * window, "a data-parallel rank's share of an iteration")
    bounds_known = [share, *bounds, *([memory] if memory else [])]
    least = min(bounds_known)
    tokens = max(window, least.tokens)
    limits = ", ".join(f"{bound.of} {bound.tokens:,}" for bound in bounds_known)
    beyond = (
        f"documents of up to {tokens:,} tokens ({tokens / window:.1f} windows) train whole, longer ones are split there"
        if tokens > window
        else f"documents above the window of {window:,} tokens are split, because none longer can train whole"
    )
    return tokens, f"{beyond}; limits: {limits}" + (
        "" if memory else "; what memory allows is not known here"
    )
