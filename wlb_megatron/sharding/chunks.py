"""For documents in chunks: which piece continues which, and which rank holds the keys of earlier chunks.

Keys stay on the rank that computed them, and travel again to each later chunk (docs/attention.md has the figures).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.orders import Link
from wlb_megatron.sharding.segments import Chunks, IntArray, ShardPlan, _ranges


def around(
    micro_batches: Sequence[npt.ArrayLike], links: Sequence[Link]
) -> tuple[list[IntArray], list[IntArray]]:
    """Two int64[n] for each micro-batch: earlier tokens that each piece attends to, and later ones that attend to it.

    micro_batches: lengths of the pieces, in tokens. Example: chunks of 5, 3 and 2 tokens have 0, 5 and 8 before them,
    and 5, 2 and 0 after them.
    """
    lengths = [np.asarray(micro_batch, dtype=np.int64) for micro_batch in micro_batches]
    prefixes, rests = ([np.zeros_like(micro_batch) for micro_batch in lengths] for _ in range(2))
    ordered = sorted(links)
    for index, piece, earlier_index, earlier_piece in ordered:
        prefixes[index][piece] = (
            prefixes[earlier_index][earlier_piece] + lengths[earlier_index][earlier_piece]
        )
    for index, piece, earlier_index, earlier_piece in reversed(ordered):
        rests[earlier_index][earlier_piece] = rests[index][piece] + lengths[index][piece]
    return prefixes, rests


class Holders:
    """Tracks which rank holds the keys of which chunk, while a data-parallel rank's micro-batches are cut in order."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links: dict[int, list[Link]] = {}
        for link in links:
            self._links.setdefault(link.micro_batch, []).append(link)
        self._plans: dict[int, ShardPlan] = {}

    def chunks(self, index: int, prefixes: IntArray, rests: IntArray, cp_size: int) -> Chunks | None:
        """What micro-batch `index` shares with others, once all before it are `settled`. prefixes, rests: see
        `around`."""
        links = self._links.get(index, [])
        if not links and not rests.any():
            return None
        cached = tuple(
            np.concatenate([np.empty((0, 6), np.int64), *(self._held(link, rank) for link in links)])
            for rank in range(cp_size)
        )
        return Chunks(index, prefixes, cached, rests)

    def settled(self, index: int, plan: ShardPlan) -> None:
        if plan.chunks is not None:
            self._plans[index] = plan

    def _held(self, link: Link, rank: int) -> IntArray:
        """Rows of Chunks.cached that `rank` holds of the earlier piece: the prefix of that piece, and the piece
        itself.
        """
        plan = self._plans[link.earlier]
        assert plan.chunks is not None
        before = plan.chunks.cached[rank]
        before = before[before[:, 0] == link.earlier_piece]
        own_rows = plan.ranks[rank]
        own_rows = own_rows[own_rows[:, 0] == link.earlier_piece]
        end = int(plan.prefixes[link.earlier_piece] + plan.lengths[link.earlier_piece])
        origin = np.broadcast_to((link.earlier, link.earlier_piece, end), (len(own_rows), 3))
        rows = np.concatenate((before, np.column_stack((own_rows, origin))))
        rows[:, 0] = link.piece
        return rows


class Taken(NamedTuple):
    """All keys (a number of rows) that a rank keeps of one piece of an earlier micro-batch."""

    micro_batch: int
    piece: int
    rows: int


class Kept(NamedTuple):
    """A piece whose keys the rank keeps for later micro-batches. rows: int64[k], the rank's own rows of it."""

    piece: int
    rows: IntArray


class CachedKeys(NamedTuple):
    """What a layer reads from its key cache, and adds to it, in one micro-batch on one rank.

    `takes` is in the order in which their rows follow the rank's own in ShardPlan.held_keys. `prefixed` says that some
    piece has a prefix. It is the same on all ranks, even if this rank holds nothing of that piece.
    """

    micro_batch: int
    takes: tuple[Taken, ...]
    keeps: tuple[Kept, ...]
    prefixed: bool


def cached_keys(plan: ShardPlan, rank: int, window: int | None = None) -> CachedKeys | None:
    """The cached keys of layers with this window, or None if no document is in chunks.

    window: in tokens. Only the last `window` keys of a chunk stay; None: all stay.

    Example: piece [0, 8) on two ranks, (0, 0, 2) (0, 6, 8) and (0, 2, 6), then piece [8, 12). The second micro-batch
    reads 4 rows of each rank. With window 3, keys 5 6 7 stay: rank 0 keeps its rows 2 3, rank 1 its row 3.
    """
    if plan.chunks is None:
        return None
    takes: list[Taken] = []
    for _, start, end, index, piece, _ in plan.cached(rank, window).tolist():
        if takes and takes[-1][:2] == (index, piece):
            takes[-1] = takes[-1]._replace(rows=takes[-1].rows + end - start)
        else:
            takes.append(Taken(index, piece, end - start))
    own_rows = plan.ranks[rank]
    size = own_rows[:, 2] - own_rows[:, 1]
    first_row = np.cumsum(size) - size
    keeps = []
    for piece in plan.chunks.continued.tolist():
        mine = own_rows[:, 0] == piece
        skip = np.zeros_like(size[mine])
        if window is not None:
            first_seen = plan.key_starts[piece + 1] - plan.key_starts[piece] - window
            skip = np.clip(first_seen - own_rows[mine, 1], 0, size[mine])
        rows = _ranges(first_row[mine] + skip, first_row[mine] + size[mine])
        if len(rows):
            keeps.append(Kept(piece, rows))
    return CachedKeys(plan.chunks.micro_batch, tuple(takes), tuple(keeps), bool(plan.prefixes.any()))
