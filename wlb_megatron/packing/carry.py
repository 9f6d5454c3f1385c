"""Continues a run with other corpora, weights, windows or packing: waiting documents come along, corpora continue.

Two corpora are the same if their lengths are, wherever they stand in the blend. A known corpus continues at its
place, so each of its tokens still trains once an epoch. If the window changed, what is left of a long document comes
in pieces of the new window (documents/piece_order.py). Weights apply from here on; there is no correction for what
a corpus gave before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wlb_megatron.documents.corpus import STATE, VERSION
from wlb_megatron.documents.piece_order import WHOLE
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.saved_pieces import packed_waiting
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


_Move = tuple[int, int, int]
"""(first, end, further): documents [first, end) of a saved corpus now have ids this much higher."""


def take_up(planner: Planner, samples: int, state: Mapping[str, Any], *, next_epoch: bool = False) -> Carried:
    """Begins `planner` in a run that has trained `samples` samples with a planner of this state.

    next_epoch: all corpora begin their next epoch. KeyError, TypeError or ValueError if the state is damaged.
    """
    stream = planner.stream
    assert isinstance(stream, DocumentStream)
    now = stream.state()
    saved = state["stream"]
    places, moves, begun_places = _places(saved, now["fingerprint"], next_epoch)
    rules, window = saved["fingerprint"], now["fingerprint"]["window"]
    kept_pieces: list[Piece] = []
    lost_pieces: list[Piece] = []
    for piece in waiting_in(state):
        further = next((by for first, end, by in moves if first <= piece.document < end), None)
        if further is None:
            lost_pieces.append(piece)
        else:
            kept_pieces += _cut(piece._replace(document=piece.document + further), window)
    for number, place in begun_places.items():
        how = {name: rules[name] for name in ("window", "overlong")}
        for piece in stream.rest_of_place(number, place, saved["version"], **how):
            kept_pieces += _cut(piece, window)
    stream.load_state({**now, "version": VERSION, "corpora": places})
    planner.begin_at(samples, kept_pieces, state.get("trained"))
    known_count = len(moves)
    on = sum(place["cursor"] > 0 or place["resume"] > 0 for place in places)
    begun, gone = (len(corpora) - known_count for corpora in (places, saved["corpora"]))
    return Carried(tuple(kept_pieces), tuple(lost_pieces), on, known_count - on, begun, gone)


def waiting_in(state: Mapping[str, Any]) -> list[Piece]:
    """Pieces that a planner's state has taken in or put back, and not trained: oldest first."""
    pieces = (item.piece for item in packed_waiting(state["packer"]))
    return [*pieces, *(Piece(*row) for row in state["put_back"])]


def _places(
    saved: Mapping[str, Any], now: Mapping[str, Any], next_epoch: bool
) -> tuple[list[dict[str, Any]], list[_Move], dict[int, dict[str, Any]]]:
    """Where each corpus of the fingerprint `now` continues, as in a stream's state, where its documents moved, and the
    saved places, by number of the corpus, of which the rest is to come in old pieces."""
    before, rules = saved["fingerprint"]["corpora"], saved["fingerprint"]
    positions = [row.get("position", number) for number, row in enumerate(saved["corpora"])]
    next_position, unmatched = 1 + max(positions), list(range(len(before)))
    places, moves, begun_places = [], [], {}
    for corpus in now["corpora"]:
        matches = [
            number for number in unmatched if all(before[number][name] == corpus[name] for name in _CORPUS)
        ]
        if not matches:
            places.append(dict.fromkeys(STATE, 0) | {"position": next_position})
            next_position += 1
            continue
        number = matches[0]
        unmatched.remove(number)
        first = before[number]["first_id"]
        moves.append((first, first + before[number]["documents"], corpus["first_id"] - first))
        place = {**saved["corpora"][number], "tokens": 0, "position": positions[number]}
        in_order = rules["seed"] == now["seed"]
        cut_alike = saved["version"] == VERSION and all(
            rules[name] == now[name] for name in ("window", "overlong")
        )
        if next_epoch or not in_order:
            in_epoch = place["cursor"] > 0 or place["resume"] > 0
            place |= {"epoch": place["epoch"] + in_epoch, "cursor": 0, "resume": 0, "earlier": []}
        elif not cut_alike:
            begun_places[len(places)] = place
            place = _with_another_window(place, saved)
        places.append(place)
    return places, moves, begun_places


def _with_another_window(place: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The place after this one, with the windows that its epoch has begun with."""
    rules, end = saved["fingerprint"], place["cursor"] + (place["resume"] > 0)
    spreads = saved["version"] >= 3 and rules["seed"] is not None and rules["overlong"] in ("split", "chunk")
    earlier_windows = [*place.get("earlier", ())]
    if end:
        earlier_windows.append((end, rules["window"] if spreads else WHOLE))
    return {**place, "cursor": end, "resume": 0, "earlier": earlier_windows}


def _cut(piece: Piece, window: int) -> Sequence[Piece]:
    """The piece, cut into pieces of a window."""
    starts = range(piece.start, piece.end, window)
    return [piece._replace(start=start, end=min(start + window, piece.end)) for start in starts]
