"""Numbers that flags take. What is out of range, and NaN and infinity, which pass most comparisons, is refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from wlb_megatron.errors import WlbError

Number = TypeVar("Number", int, float)

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
    return _within(int, "a whole number", low, high)


def real(low: float, high: float = LARGEST) -> Callable[[str], float]:
    """An argparse type: a number from `low` to `high`, never NaN."""
    return _within(float, "a number", low, high)


def _within(number: Callable[[str], Number], kind: str, low: float, high: float) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        with suppress(ValueError):
            value = number(text)
            if low <= value <= high:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind} from {low} to {high}")

    return read


def check_heads(heads: int, groups: int | None, *, hidden: int | None = None, tp: int = 1) -> None:
    """Raises WlbError if attention heads do not divide as Megatron divides them.

    hidden: given if a head's channels are its share of hidden.
    """
    if (hidden or heads) % heads:
        raise WlbError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}; give --kv-channels"
        )
    for size, what in ((groups or heads, "--num-query-groups"), (tp, "the tensor-parallel size")):
        if heads % size:
            raise WlbError(f"--num-attention-heads {heads} is not a multiple of {what} {size}")
