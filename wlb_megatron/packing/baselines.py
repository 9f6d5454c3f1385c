"""Packs fixed windows as Megatron does (original).

Every window holds exactly `window` tokens. A document that crosses a window's end is cut there. The rest is a new
piece, with its own mask and positions from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wlb_megatron.packing.packer import Packed, Packer, PackingJob, check_settings, decode, encode
from wlb_megatron.packing.varlen.arrange import in_given_order
from wlb_megatron.plan import MicroBatch, Piece, Waiting
from wlb_megatron.workload.cost_model import CostModel


def cut(piece: Piece, tokens: int) -> tuple[Piece, Piece]:
    """The first `tokens` tokens of a piece, and the rest: [2, 10) cut at 3 is [2, 5) and [5, 10)."""
    cut_token = piece.start + tokens
    return piece._replace(end=cut_token), piece._replace(start=cut_token)


def price(pieces: Sequence[Piece], cost: CostModel) -> int:
    """Work of a micro-batch of these pieces."""
    return int(cost.work([piece.end - piece.start for piece in pieces]).sum())


def cut_windows(
    items: Sequence[Waiting], window: int, count: int, max_documents: int
) -> tuple[list[list[Waiting]], list[Waiting]]:
    """At most `count` windows of `window` tokens, in order, cutting the piece that crosses an end; and what remains.

    Example: window 8, pieces of 6, 5, 5 tokens: [6, 2], [3, 5], nothing remains. Only the last window may be short,
    or one that reached max_documents pieces.
    """
    windows: list[list[Waiting]] = []
    room = 0
    for index, item in enumerate(items):
        while True:
            if not room:
                if len(windows) == count:
                    return windows, [item, *items[index + 1 :]]
                windows.append([])
                room = window
            fits = item.piece.tokens <= room
            head, tail = (item.piece, item.piece) if fits else cut(item.piece, room)
            windows[-1].append(item._replace(piece=head))
            room = 0 if len(windows[-1]) == max_documents else room - head.tokens
            if fits:
                break
            item = item._replace(piece=tail)
    return windows, []


def keep_one_window(
    remainder: list[Waiting], window: int, iteration: int
) -> tuple[list[Waiting], tuple[Piece, ...]]:
    """What waits after a cut, at most a window's tokens, and what is put back beyond that.

    Only this iteration's arrivals, which come last, are put back; earlier ones have been counted, and stay. More than
    a window's tokens remain only if windows were closed by their number of documents.
    """
    tokens = 0
    for index, item in enumerate(remainder):
        if tokens >= window and item.entry == iteration:
            return remainder[:index], tuple(item.piece for item in remainder[index:])
        tokens += item.piece.tokens
    return remainder, ()


def freeze(windows: Sequence[Sequence[Waiting]], count: int, cost: CostModel) -> list[MicroBatch]:
    """Micro-batches of these windows, with empty ones added up to `count`."""
    contents = [tuple(item.piece for item in window) for window in windows]
    contents += [()] * (count - len(windows))
    return [MicroBatch(pieces, price(pieces, cost)) for pieces in contents]


class OriginalPacker(Packer):
    """Windows filled in arrival order, given to ranks in that order. A step has a global batch's tokens, so nothing
    bounds them."""

    def __init__(self, job: PackingJob) -> None:
        self._cost = job.cost
        self._max_documents = self.most_pieces = job.config.max_documents
        self._window = self.max_tokens = job.window
        self.bins = job.bins
        self._ranks = job.ranks
        self.law = job.ranks.law(job.cost)
        self._waiting: list[Waiting] = []  # in no window yet

    @property
    def waiting(self) -> tuple[Piece, ...]:
        return tuple(item.piece for item in self._waiting)

    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        self._waiting += (Waiting(piece, iteration) for piece in arrived)
        windows, remainder = cut_windows(self._waiting, self._window, bins, self._max_documents)
        self._waiting, put_back = keep_one_window(remainder, self._window, iteration)
        return Packed(in_given_order(freeze(windows, bins, self._cost), self._ranks.dp), put_back)

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        settings, waiting_pieces = self._settings(), tuple(self._waiting)
        return lambda: {"settings": settings, "waiting": encode(waiting_pieces)}

    def load_state(self, state: dict[str, Any]) -> None:
        check_settings(state["settings"], self._settings())
        self._waiting = decode(state["waiting"])

    def _settings(self) -> dict[str, Any]:
        return {"packing": "original", "window": self._window, "max_documents": self._max_documents}
