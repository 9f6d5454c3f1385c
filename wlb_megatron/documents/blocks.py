"""Goes through long arrays a block at a time, so that an array mapped from a file is never copied whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.integer[Any]]
"""Tokens of documents, of any integer dtype (an index's are int32, mapped from its file). Compute with int64 copies."""

SIZE = 1 << 20


def blocks(array: npt.NDArray[Any], size: int = SIZE) -> Iterator[npt.NDArray[np.int64]]:
    """Consecutive int64 copies of `size` entries, the last one shorter."""
    for begin in range(0, len(array), size):
        yield array[begin : begin + size].astype(np.int64)
