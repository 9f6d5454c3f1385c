"""Continues a run with other corpora, weights, windows or packing: waiting documents come along, corpora continue.

Two corpora are the same if their lengths are, wherever they stand in the blend. A known corpus continues at its
place, so each of its tokens still trains once an epoch. With another seed or window, which change the order of an
epoch, it begins its next one. Weights apply from here on; there is no correction for what a corpus gave before.

Checkpoints also hold what the run has chosen, and a resumed run goes on with it until a flag says otherwise. A setting
left to `auto` may come to something else on another layout. A run that changed it halfway would not be the same run any
more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.stream import STATE, VERSION
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.packer import Packer, packed_waiting
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker
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
    now = stream.state()
    saved, window = state["stream"], now["fingerprint"]["window"]
    if saved["version"] != VERSION:
        raise ValueError(f"a document stream of version {saved['version']}")
    places, moves = _places(saved, now["fingerprint"], next_epoch)
    kept_pieces: list[Piece] = []
    lost_pieces: list[Piece] = []
    for piece in waiting_in(state):
        further = next((by for first, end, by in moves if first <= piece.document < end), None)
        if further is None:
            lost_pieces.append(piece)
        else:
            kept_pieces += _cut(piece._replace(document=piece.document + further), window)
    stream.load_state({**now, "version": VERSION, "corpora": places})
    planner.begin_at(samples, kept_pieces, state["trained"])
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
) -> tuple[list[dict[str, Any]], list[_Move]]:
    """Where each corpus of the fingerprint `now` continues, as in a stream's state, and where its documents moved."""
    before, rules = saved["fingerprint"]["corpora"], saved["fingerprint"]
    positions = [row.get("position", number) for number, row in enumerate(saved["corpora"])]
    next_position, unmatched = 1 + max(positions), list(range(len(before)))
    same_order = all(rules[name] == now[name] for name in ("seed", "window", "overlong"))
    places, moves = [], []
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
        if next_epoch or not same_order or place.pop("earlier", None):
            in_epoch = place["cursor"] > 0 or place["resume"] > 0
            place |= {"epoch": place["epoch"] + in_epoch, "cursor": 0, "resume": 0}
        places.append(place)
    return places, moves


def _cut(piece: Piece, window: int) -> Sequence[Piece]:
    """The piece, cut into pieces of a window."""
    starts = range(piece.start, piece.end, window)
    return [piece._replace(start=start, end=min(start + window, piece.end)) for start in starts]


def chosen(config: WlbConfig, packer: Packer) -> dict[str, Any]:
    """A run's choices, JSON-able, by the field of WlbConfig that asks for each.

    Args:
        token_weights: step or equal.
        fresh_order: the order of documents was begun as --wlb-fresh-order asks, which is not done again when the job
            is requeued.
        chunks: long documents train in chunks.
        batch_spread: see Packer.
    """
    return {
        "token_weights": _token_weights(config, packer),
        "fresh_order": config.fresh_order,
        "chunks": isinstance(packer, ChunkPacker),
        "batch_spread": packer.batch_spread,
    }


def saved_choices(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """The choices of the run that saved this packing state. Empty where there is none, or it cannot be read."""
    return {} if state is None else state.get("choices", {})


def began_otherwise(config: WlbConfig, packer: Packer, saved: Mapping[str, Any]) -> WlbConfig | None:
    """The settings by which the packer must be made anew to go on as the checkpoint's run began: with documents in
    chunks, or whole, as there. None if it does already. saved: see saved_choices."""
    if not saved or config.fixed_windows:
        return None
    auto = config.chunks == "auto" and config.overlong != "chunk" and config.cp_mode == "fixed"
    if not auto or saved["chunks"] == isinstance(packer, ChunkPacker):
        return None
    return replace(config, chunks="on" if saved["chunks"] else "off")


def keep(config: WlbConfig, packer: Packer, saved: Mapping[str, Any]) -> tuple[WlbConfig, list[str]]:
    """The settings with the choices that the checkpoint's run made, and what there is to say of them.

    saved: see saved_choices; empty where the checkpoint holds none, so that this run makes its own.
    """
    if not saved:
        return config, []
    before, now = saved["token_weights"], _token_weights(config, packer)
    lines = []
    if config.token_weights == "auto":
        config = replace(config, token_weights=before)
        if before != now:
            lines = [
                f"--wlb-token-weights stays {before}, as the run began: auto would be {now} on this layout"
            ]
    elif before != now:
        lines = [f"--wlb-token-weights is {now} from here on, where the checkpoint's run had {before}"]
    return replace(config, fresh_order=config.fresh_order or saved["fresh_order"]), lines


def _token_weights(config: WlbConfig, packer: Packer) -> str:
    return "equal" if weighs_equally(config, packer) else "step"


def weighs_equally(config: WlbConfig, packer: Packer) -> bool:
    """The choice `auto` weighs tokens equally where documents may wait. Those train in fuller steps, so a mean over
    the step's tokens would give their tokens less weight. Measured: docs/measured.md, equal weights of tokens."""
    if config.token_weights == "auto":
        return isinstance(packer, VarlenPacker) and packer.longest_delay > 0
    return config.token_weights == "equal"
