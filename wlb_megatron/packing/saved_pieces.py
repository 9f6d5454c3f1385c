"""Encodes waiting pieces as text for a checkpoint. Fixed windows over several global batches have hundreds of
thousands.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from wlb_megatron.errors import WlbError
from wlb_megatron.plan import Piece


class Waiting(NamedTuple):
    """A piece that waits, and the iteration in which it arrived."""

    piece: Piece
    entry: int


def encode(waiting_pieces: Iterable[Waiting]) -> str:
    """Columns epoch, document, start, end, entry as little-endian int64, compressed, in base64."""
    items = list(waiting_pieces)
    pieces = chain.from_iterable(item.piece for item in items)
    rows = np.fromiter(pieces, dtype="<i8", count=5 * len(items)).reshape(-1, 5)
    rows[:, 4] = np.fromiter((item.entry for item in items), dtype="<i8", count=len(items))
    return base64.b64encode(zlib.compress(rows.T.tobytes(), 1)).decode()


def decode(saved: str | Iterable[Sequence[int]]) -> list[Waiting]:
    """What was encoded; or rows [epoch, document, start, end, entry], as states of version 2 have them."""
    if not isinstance(saved, str):
        return [Waiting(Piece(*(int(x) for x in row[:4])), int(row[4])) for row in saved]
    try:
        columns = np.frombuffer(zlib.decompress(base64.b64decode(saved)), dtype="<i8").reshape(5, -1).tolist()
    except (ValueError, zlib.error):
        raise WlbError("the packing state is damaged: resume from another checkpoint") from None
    pieces = map(tuple.__new__, repeat(Piece), zip(*columns[:4], repeat(0)))  # the last has no end
    return list(map(Waiting, pieces, columns[4]))


def packed_waiting(packer: Mapping[str, Any]) -> list[Waiting]:
    """What waits by a packer's state, oldest first."""
    windows = decode_windows(packer.get("planned", ()))
    return sorted([*decode(packer["waiting"]), *chain.from_iterable(windows)], key=lambda item: item.entry)


def encode_windows(windows: Sequence[Sequence[Waiting]]) -> dict[str, Any]:
    """Pieces of consecutive windows, and how many each has."""
    return {"pieces": encode(chain.from_iterable(windows)), "sizes": [len(window) for window in windows]}


def decode_windows(saved: dict[str, Any] | Sequence[Sequence[Sequence[int]]]) -> list[list[Waiting]]:
    """What was encoded; or rows of each window, as states of version 2 have them."""
    if not isinstance(saved, dict):
        return [decode(window) for window in saved]
    items = iter(decode(saved["pieces"]))
    return [[next(items) for _ in range(size)] for size in saved["sizes"]]
