"""Numbers that flags take. What is out of range, and NaN and infinity, which pass most comparisons, is refused."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from wlb_megatron.errors import WlbError

TOKENS = 1 << 30
"""The most tokens of a window or micro-batch: its square, the work of attention, must fit a 64-bit integer."""
RANKS = 1 << 16
COUNT = 1 << 20
SEED = (1 << 31) - 1
SECONDS = 1e7
LARGEST = 1e30
"""The largest rate or cost."""


def whole(low: int, high: int = COUNT) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        _check(text, "a whole number", value, low, high)
        return value

    return read


def real(low: float, high: float = LARGEST) -> Callable[[str], float]:
    """An argparse type: a number from `low` to `high`, never NaN."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        _check(text, "a number", value, low, high)
        return value

    return read


def _check(text: str, kind: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind} from {low} to {high}")


def check_heads(heads: int, groups: int | None, *, hidden: int | None = None, tp: int = 1) -> None:
    """Raises WlbError if attention heads do not divide as Megatron divides them.

    hidden: given if a head's channels are its share of hidden.
    """
    for multiple, divisor, message in (
        (
            hidden or heads,
            heads,
            "--hidden-size {} is not a multiple of --num-attention-heads {}; give --kv-channels",
        ),
        (heads, groups or heads, "--num-attention-heads {} is not a multiple of --num-query-groups {}"),
        (heads, tp, "--num-attention-heads {} is not a multiple of the tensor-parallel size {}"),
    ):
        if multiple % divisor:
            raise WlbError(message.format(multiple, divisor))
