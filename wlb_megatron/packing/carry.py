"""Continues a run with other corpora, weights, windows or packing: waiting documents come along, corpora continue.

Two corpora are the same if their lengths are, wherever they stand in the blend. A known corpus continues at its
place, so each of its documents still trains once an epoch. If the window changed, documents longer than either window
may repeat tokens or miss some. Weights apply from here on; there is no correction for what a corpus gave before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wlb_megatron.documents.corpus import VERSION
from wlb_megatron.documents.epoch_order import MOST_STORED
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.saved_pieces import decode, decode_windows
from wlb_megatron.plan import Piece

_CORPUS = ("documents", "tokens", "sha256 of lengths")
"""The fields that identify a corpus."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What a continued run takes along.

    kept: pieces that waited and train first. lost: waiting pieces of corpora that are gone. going_on, restarted,
    begun: how many corpora continue at their place, begin their next epoch, or are new. gone: saved corpora that this
    run does not have.
    """

    kept: tuple[Piece, ...]
    lost: tuple[Piece, ...]
    going_on: int
    restarted: int
    begun: int
    gone: int


@dataclass(frozen=True, slots=True)
class _Move:
    """Documents [first, end) of a saved corpus now have ids this much higher."""

    first: int
    end: int
    further: int


def take_up(planner: Planner, samples: int, state: Mapping[str, Any], *, next_epoch: bool = False) -> Carried:
    """Begins `planner` in a run that has trained `samples` samples with a planner of this state.

    next_epoch: all corpora begin their next epoch. KeyError, TypeError or ValueError if the state is damaged.
    """
    now = planner.stream.state()
    places, moves = _places(state["stream"], now["fingerprint"], next_epoch)
    kept: list[Piece] = []
    lost: list[Piece] = []
    for piece in waiting_in(state):
        move = next((move for move in moves if move.first <= piece.document < move.end), None)
        if move is None:
            lost.append(piece)
        else:
            moved = piece._replace(document=piece.document + move.further)
            kept += _cut(moved, now["fingerprint"]["window"])
    planner.stream.load_state({**now, "version": VERSION, "corpora": places})
    planner.begin_at(samples, kept, state.get("trained"))
    known = len(moves)
    on = sum(place["cursor"] > 0 or place["resume"] > 0 for place in places)
    return Carried(
        tuple(kept), tuple(lost), on, known - on, len(places) - known, len(state["stream"]["corpora"]) - known
    )


def waiting_in(state: Mapping[str, Any]) -> list[Piece]:
    """Pieces that a planner's state has taken in or put back, and not trained: oldest first."""
    packer = state["packer"]
    items = [
        *decode(packer["waiting"]),
        *(item for window in decode_windows(packer.get("planned", ())) for item in window),
    ]
    pieces = [item.piece for item in sorted(items, key=lambda item: item.entry)]
    return [*pieces, *(Piece(*row) for row in state["put_back"])]


def _places(
    saved: Mapping[str, Any], now: Mapping[str, Any], next_epoch: bool
) -> tuple[list[dict[str, int]], list[_Move]]:
    """Where each corpus of the fingerprint `now` continues, as in a stream's state, and where its documents moved."""
    before, rules = saved["fingerprint"]["corpora"], saved["fingerprint"]
    positions = [row.get("position", at) for at, row in enumerate(saved["corpora"])]
    free, left = 1 + max(positions), list(range(len(before)))
    places, moves = [], []
    for corpus in now["corpora"]:
        same = [at for at in left if all(before[at][name] == corpus[name] for name in _CORPUS)]
        if not same:
            new = dict.fromkeys(
                ("epoch", "cursor", "resume", "tokens", "empty", "overlong", "lost_tokens"), 0
            )
            places.append(new | {"position": free})
            free += 1
            continue
        at = same[0]
        left.remove(at)
        moves.append(_moved(before[at], corpus))
        place = {**saved["corpora"][at], "tokens": 0, "position": positions[at]}
        in_order = rules["seed"] == now["seed"] and (
            saved["version"] > 1 or corpus["documents"] <= MOST_STORED
        )
        cut_alike = saved["version"] == VERSION and all(
            rules[name] == now[name] for name in ("window", "overlong")
        )
        if next_epoch or not in_order:
            begun = place["cursor"] > 0 or place["resume"] > 0
            place |= {"epoch": place["epoch"] + begun, "cursor": 0, "resume": 0}
        elif place["resume"] and not cut_alike:
            place |= {"cursor": place["cursor"] + 1, "resume": 0}
        places.append(place)
    return places, moves


def _moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> _Move:
    first = before["first_id"]
    return _Move(first, first + before["documents"], now["first_id"] - first)


def _cut(piece: Piece, window: int) -> Sequence[Piece]:
    """The piece, cut into pieces of a window."""
    starts = range(piece.start, piece.end, window)
    return [piece._replace(start=at, end=min(at + window, piece.end)) for at in starts]
