"""Hybrid sharding: keeps short pieces whole on one rank, and cuts long ones over as many ranks as balance needs.

A whole piece sends no keys and needs one kernel segment. A piece cut over g ranks in causal pairs (rank p of g holds
chunks p and 2g-1-p of 2g) has even work, but costs keys, tiles and kernel calls. Every rank ends with exactly the
same number of tokens: the longest piece, the filler, is placed last and fills what is left on each rank
(filler.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.sharding.alignment import slot_bounds
from wlb_megatron.sharding.cuts.filler import fill_in_pairs, fill_in_turn, prices_in_pairs, prices_in_turn
from wlb_megatron.sharding.cuts.rank_loads import Chunk, RankLoads
from wlb_megatron.sharding.cuts.slots import PieceList
from wlb_megatron.sharding.segments import IntArray, ShardPlan
from wlb_megatron.workload.kernel_table import TILE, KernelTable

GRAINS = (1, 2, 4, 8)
"""Values to try for how finely pieces are cut: a rank's share of a piece may cost at most a rank's fair load divided
by this."""

TRIES = 5
"""The most candidates to try, the most promising first. Over 87 mixes at CP 2 to 16, five come within 1 % of trying
all."""


class _Candidate(NamedTuple):
    """One candidate: over how many ranks each piece is cut, what that costs a rank, and how the filler is cut."""

    least: float
    degree: list[int]
    share_ns: list[int]
    prices: Callable[[int, float, float], list[float]]
    fill: Callable[[RankLoads], None]


def hybrid(pieces: PieceList, cp_size: int, table: KernelTable) -> list[ShardPlan]:
    """The plan of each micro-batch, see `mix`."""
    lengths, before = (np.split(column, pieces.first[1:-1]) for column in (pieces.lengths, pieces.prefixes))
    return [
        mix(tokens, cp_size, table, prefixes)
        for tokens, prefixes in zip(lengths[: pieces.count], before, strict=False)
    ]


def mix(
    lengths: npt.ArrayLike, cp_size: int, table: KernelTable, prefixes: npt.ArrayLike | None = None
) -> ShardPlan:
    """The plan of one micro-batch.

    lengths: int[n] tokens of each piece, padding piece included. prefixes: int[n], earlier tokens that each attends
    to (default none).

    Example: lengths [16, 4, 4, 4, 4], CP=2: each rank holds two short pieces whole and 8 tokens of the long one.
    Raises ValueError if the total is not a positive multiple of cp_size.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    before = np.zeros_like(lengths) if prefixes is None else np.asarray(prefixes, dtype=np.int64)
    slot_bounds(int(lengths.sum()), cp_size)  # refuses totals that would leave ranks unequal
    order = np.argsort(-lengths, kind="stable")[: int(np.count_nonzero(lengths))].tolist()
    whole_ns = table.diagonal_ns(lengths)
    chunks = np.flatnonzero(before * lengths)
    whole_ns[chunks] += table.rectangle_ns(lengths[chunks], before[chunks])
    size, filler = lengths.tolist(), order[0]
    best_ranks: RankLoads | None = None
    candidates = sorted(
        _candidates(lengths, before, whole_ns, filler, cp_size, table), key=lambda mixed: mixed.least
    )
    for candidate in candidates[:TRIES]:
        if best_ranks is not None and 1.01 * candidate.least >= best_ranks.worst():
            break
        mean_price = int(whole_ns[filler]) / size[filler]
        rise = size[filler] / (size[filler] + 2 * int(before[filler]))
        ranks = RankLoads(table, size, filler, candidate.prices(cp_size, mean_price, rise), before.tolist())
        _place(ranks, order[1:], candidate)
        candidate.fill(ranks)
        if best_ranks is None or ranks.worst() < best_ranks.worst():
            best_ranks = ranks
    assert best_ranks is not None
    return _plan(lengths, before, cp_size, best_ranks.chunks)


def _candidates(
    lengths: IntArray, before: IntArray, whole_ns: IntArray, filler: int, cp_size: int, table: KernelTable
) -> list[_Candidate]:
    """Candidates without duplicates. A piece over two ranks needs one kernel call on each, over more mostly two."""
    degrees: dict[bytes, IntArray] = {}
    for grain in GRAINS:
        fair = int(whole_ns.sum()) // (cp_size * grain) + 1
        for most_ranks in (2, cp_size):
            degree = np.clip(-(-whole_ns // fair), 1, min(most_ranks, cp_size))
            degree[filler] = 1  # placed last, in the free tokens: its own degree does not matter
            degrees.setdefault(degree.tobytes(), degree)
    candidates = []
    for degree in degrees.values():
        share_ns = _share_ns(lengths, before, whole_ns, degree, table)
        mean = int((share_ns * degree).sum()) / cp_size
        most_ranks = int(degree.max())
        both = (degree.tolist(), share_ns.tolist())
        calls = min(most_ranks - 1, 2)
        candidates.append(_Candidate(mean + table.earlier_call * calls, *both, prices_in_turn, fill_in_turn))
        calls = 2 if cp_size > 2 else 1
        candidates.append(
            _Candidate(mean + table.earlier_call * calls, *both, prices_in_pairs, fill_in_pairs)
        )
    return candidates


def _share_ns(
    lengths: IntArray, before: IntArray, whole_ns: IntArray, degree: IntArray, table: KernelTable
) -> IntArray:
    """int64[n]: nanoseconds that a piece costs each of the ranks that it is cut over."""
    chunk = -(-lengths // (2 * degree))
    tiles = -(-chunk // TILE) * TILE / np.maximum(chunk, 1)
    keys = before + (2 * degree - 1) * lengths // (2 * degree)
    cut_ns = whole_ns / degree * tiles + 2 * table.segment + table.earlier_key * keys
    return np.where(degree > 1, np.rint(cut_ns), whole_ns).astype(np.int64)


def _place(ranks: RankLoads, order: list[int], candidate: _Candidate) -> None:
    """Places these pieces, the longest first.

    A piece that does not fit at its degree is cut over more ranks. If it fits at no degree, it is placed last, in
    parts that fill the ranks.
    """
    ranks.expect(
        [candidate.share_ns[piece] * candidate.degree[piece] for piece in order],
        [ranks.size[p] for p in order],
    )
    unplaced = []
    for nth, piece in enumerate(order):
        g, ns = candidate.degree[piece], candidate.share_ns[piece]
        if g == 1 and ranks.put_whole(nth, piece, ns):
            continue
        total = g * ns
        while g <= len(ranks.free) and not ranks.put_cut(nth, piece, g, total // g):
            g += 1
        if g > len(ranks.free):
            unplaced.append(piece)
    for piece in unplaced:
        ranks.put_in_parts(piece, candidate.share_ns[piece] * candidate.degree[piece])


def _plan(lengths: IntArray, before: IntArray, cp_size: int, chunks: dict[int, list[Chunk]]) -> ShardPlan:
    """The segments, the longest first.

    Kernels start sequences in order. A long one that starts last keeps a few of a GPU's processors busy alone
    (docs/attention.md has the cost).
    """
    rank_rows: list[list[tuple[int, int, int]]] = [[] for _ in range(cp_size)]
    for piece in sorted(chunks):
        end, last = int(before[piece]), -1
        for rank, tokens in chunks[piece]:
            if not tokens:
                continue
            start, end = end, end + tokens
            if rank == last:  # touches: one segment
                rank_rows[rank][-1] = (*rank_rows[rank][-1][:2], end)
                continue
            rank_rows[rank].append((piece, start, end))
            last = rank
    for rows in rank_rows:
        rows.sort(key=lambda row: (row[1] - row[2], row))
    return ShardPlan(lengths, tuple(np.array(rows, dtype=np.int64).reshape(-1, 3) for rows in rank_rows))
