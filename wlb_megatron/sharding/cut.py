"""Pads planned micro-batches and cuts them over context-parallel ranks, for training and for every command.

They are cut by a named sharding, or by the one that is predicted fastest: by each rank's attention time, as the
executor runs it (attention_calls.py). All diagonals of a rank are one call on its own keys, while the other keys
travel. All its rectangles are another call. If the plan says so, one call computes everything (in_fewest_calls).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.orders import Link, groups, joined_groups, links_of
from wlb_megatron.plan import PADDING, IterationPlan, Piece
from wlb_megatron.registry import SHARDINGS, builds_by_size
from wlb_megatron.sharding.segments import Chunks, IntArray, ShardPlan
from wlb_megatron.sharding.slots import PieceList, padding
from wlb_megatron.workload.kernel_table import KernelTable, h100


def cut(
    lengths: Sequence[npt.NDArray[np.int64]],
    cp_size: int,
    sharding: str,
    table: KernelTable,
    links: Sequence[Link] = (),
) -> list[ShardPlan]:
    """Shard plans of micro-batches.

    lengths: int64[n] each, tokens of a micro-batch's pieces. If the sharding is one that chooses by the table, the
    table also chooses between one kernel call and two. The fixed shardings keep two, as in the paper. links: see
    shard_all.
    """
    shards = shard_all(lengths, cp_size, sharding, table, links)
    return in_fewest_calls(shards, table) if SHARDINGS[sharding].chooses else shards


def shard(lengths: npt.ArrayLike, cp_size: int, kind: str, table: KernelTable | None = None) -> ShardPlan:
    """The shard plan of one micro-batch.

    * lengths: int[n], tokens of each piece in packed order, the padding piece (if any) last. Their sum must be a
      positive multiple of cp_size; else ValueError.
    * kind: one of registry.SHARDINGS.
    * table: kernel times by which adaptive predicts (default: the H100's).
    """
    return shard_all([lengths], cp_size, kind, table)[0]


def shard_all(
    micro_batches: Sequence[npt.ArrayLike],
    cp_size: int,
    kind: str,
    table: KernelTable | None = None,
    links: Sequence[Link] = (),
) -> list[ShardPlan]:
    """Shard plans of several micro-batches in one pass, much faster than one by one. See `shard`.

    links: documents in chunks (pipeline.orders.links_of). If given, the micro-batches are all those of one
    data-parallel rank's iteration, in order, or of several, one after another.
    """
    prefixes, rests = around(micro_batches, links) if links else ([], [])
    pieces = PieceList.of(micro_batches, prefixes)
    table = table or h100()
    choices = _choices(pieces, cp_size, kind, table)
    if not links:
        return _fastest(choices, table)
    # Only once earlier micro-batches are cut is it known which rank holds a prefix's keys.
    depths = [0] * pieces.count
    links_into: dict[int, list[Link]] = {}
    for link in sorted(links):
        depths[link.micro_batch] = max(depths[link.micro_batch], depths[link.earlier] + 1)
        links_into.setdefault(link.micro_batch, []).append(link)
    chosen_plans = choices[next(iter(choices))].copy()
    for depth in range(max(depths) + 1):
        turn = [index for index, number in enumerate(depths) if number == depth]
        shared = [
            _shared(index, links_into.get(index, []), chosen_plans, prefixes[index], rests[index])
            for index in turn
        ]
        of_turn = {
            name: [replace(plans[index], chunks=chunks) for index, chunks in zip(turn, shared, strict=True)]
            for name, plans in choices.items()
        }
        for index, plan in zip(turn, _fastest(of_turn, table), strict=True):
            chosen_plans[index] = plan
    return chosen_plans


def _choices(pieces: PieceList, cp_size: int, kind: str, table: KernelTable) -> dict[str, list[ShardPlan]]:
    """The plans of all micro-batches under each sharding that `kind` chooses from, by what logs call them. On a tie,
    the first is taken."""
    names = SHARDINGS[kind].chooses or (kind,)
    if cp_size == 1 or not pieces.count:
        names = names[:1]  # one rank holds all pieces whole
    plans = {name: SHARDINGS[name].load()(pieces, cp_size, table) for name in names}
    return plans if len(plans) > 1 else {"": plans[names[0]]}


def _fastest(choices: dict[str, list[ShardPlan]], table: KernelTable) -> list[ShardPlan]:
    """For each micro-batch, the plan that is predicted fastest; on a tie, the first."""
    if len(choices) == 1:
        return next(iter(choices.values()))
    times = predict_all([plan for plans in choices.values() for plan in plans], table).max(axis=1)
    fastest = times.reshape(len(choices), -1).argmin(axis=0).tolist()
    names = list(choices)
    return [
        replace(choices[names[choice]][index], kind=names[choice]) for index, choice in enumerate(fastest)
    ]


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


def _shared(
    index: int, links: Sequence[Link], plans: Sequence[ShardPlan], prefixes: IntArray, rests: IntArray
) -> Chunks | None:
    """What micro-batch `index` shares with others. links: its own. plans: those of earlier micro-batches are chosen.
    prefixes, rests: see `around`."""
    if not links and not rests.any():
        return None
    cached = tuple(
        np.concatenate(
            [np.empty((0, 6), np.int64), *(_held_rows(link, plans[link.earlier], rank) for link in links)]
        )
        for rank in range(plans[index].cp_size)
    )
    return Chunks(index, prefixes, cached, rests)


def _held_rows(link: Link, plan: ShardPlan, rank: int) -> IntArray:
    """Rows of Chunks.cached that `rank` holds of the earlier piece, in `plan`: the prefix of that piece, and the piece
    itself.
    """
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


MOST_ROWS, MOST_KEYS = 8192, 32768
"""Limits of one call on a rank, in rows and keys, for cuDNN's kernels only. Above them one call was not faster for
hybrid plans, and the limits avoid building graphs of such sizes."""


def in_fewest_calls(plans: Sequence[ShardPlan], table: KernelTable) -> list[ShardPlan]:
    """The plans (all of one CP size), with `one_call` set where it is predicted faster. The same on all ranks.

    Two calls (attention_calls.py) use the faster kernels: causal squares, and rectangles without a mask. The first runs
    while keys travel. One bottom-right call waits for its keys, and in backward also computes what its mask hides. But
    it needs half the launches, and gathers no queries and merges no outputs.

    So with cuDNN's kernels, one call is for short pieces cut over ranks. Of 26 mixes that hybrid cuts over 8 ranks it
    is faster for 11 at a window of 8K, 9 at 16K, 1 at 32K and none above (predicted from the H100's table;
    docs/results/simulated/one_call.csv). FlashAttention-4 skips masked keys in backward, too.
    """
    small = [index for index, plan in enumerate(plans) if _fits(plan, table)]
    fewest = list(plans)
    if small:
        small_plans = [plans[index] for index in small]
        two_calls, one_call = (
            prediction(small_plans, table).max(axis=1) for prediction in (in_two_calls, in_one_call)
        )
        for index in np.flatnonzero(one_call < two_calls).tolist():
            fewest[small[index]] = replace(small_plans[index], one_call=True)
    return fewest


def _fits(plan: ShardPlan, table: KernelTable) -> bool:
    """Whether any rank attends to earlier keys and, if kernels are built by size, no rank exceeds the limits above."""
    fits = not builds_by_size(table.backend) or (
        max(plan.tokens_per_rank) <= MOST_ROWS
        and max(int(rows[:, 2].sum()) for rows in plan.ranks) <= MOST_KEYS
    )
    return fits and any(bool((rows[:, 1] > 0).any()) for rows in plan.ranks)


def pad(pieces: tuple[Piece, ...], alignment: int) -> tuple[Piece, ...]:
    """The pieces, with a padding piece appended if their tokens are not a multiple of `alignment`."""
    missing = padding(sum(piece.end - piece.start for piece in pieces), alignment)
    return (*pieces, Piece(0, PADDING, 0, missing)) if missing else pieces


def cut_plans(
    plans: Sequence[IterationPlan], cp_size: int, alignment: int, sharding: str, table: KernelTable
) -> list[list[list[ShardPlan]]]:
    """Shard plans [iteration][micro-batch][data-parallel rank], as each rank cuts its own in training."""
    columns = [
        [pad(micro_batch.pieces, alignment) for micro_batch in column]
        for plan in plans
        for column in zip(*plan.micro_batches, strict=True)
    ]
    # All in one pass, which is much faster than rank by rank.
    firsts = np.cumsum([0, *map(len, columns)]).tolist()
    links = [
        Link(link.micro_batch + first, link.piece, link.earlier + first, link.earlier_piece)
        for column, first in zip(columns, firsts, strict=False)
        for link in links_of(column)
    ]
    lengths = [np.array([piece.tokens for piece in pieces]) for column in columns for pieces in column]
    together = cut(lengths, cp_size, sharding, table, links)
    ranks = iter(
        [_counted_from(first, plan) for plan in together[first:end]] for first, end in pairwise(firsts)
    )
    return [
        [list(row) for row in zip(*[next(ranks) for _ in plan.micro_batches[0]], strict=True)]
        for plan in plans
    ]


def _counted_from(first: int, plan: ShardPlan) -> ShardPlan:
    """The plan, with micro-batches counted from this one on."""
    chunks = plan.chunks
    if chunks is None or not first:
        return plan
    cached = tuple(rows - np.array([0, 0, 0, first, 0, 0]) for rows in chunks.cached)
    return replace(plan, chunks=replace(chunks, micro_batch=chunks.micro_batch - first, cached=cached))


def orders_of(plans: Sequence[IterationPlan], *, in_step: bool = False) -> list[list[tuple[int, ...] | None]]:
    """Group sizes [iteration][data-parallel rank], or None if no document is in chunks.

    in_step: all ranks run the same order (packing.limits.Trainer).
    """
    orders: list[list[tuple[int, ...] | None]] = []
    for plan in plans:
        sizes = [
            groups([column_sizes.pieces for column_sizes in column])
            for column in zip(*plan.micro_batches, strict=True)
        ]
        if in_step:
            sizes = [joined_groups(sizes)] * len(sizes)
        orders.append([column_sizes if max(column_sizes) > 1 else None for column_sizes in sizes])
    return orders


def digest_of_cuts(shards: Iterable[ShardPlan]) -> bytes:
    """An 8-byte hash of every segment of every rank, the cached keys, and the number of kernel calls."""
    digest = hashlib.blake2b(digest_size=8)
    for shard in shards:
        arrays = [shard.lengths, shard.prefixes, *shard.ranks]
        if shard.chunks is not None:
            arrays += [shard.chunks.rests, *shard.chunks.cached]
        sizes = [int(shard.one_call), len(shard.ranks), *map(len, arrays)]
        for array in (np.array(sizes), *arrays):
            digest.update(np.ascontiguousarray(array, dtype=np.int64))
    return digest.digest()


ONE_CALL = 0.7
"""Share of the executor's work around a call on earlier keys (KernelTable.second_call) that one call for everything
also needs. It gathers keys and returns their gradients, but merges no output. From 348 shares of windows of 32K on an
H200 with cuDNN, where second_call is 110 us: one call took 75 us longer than predicted without it
(docs/results/1x_h200/fa4)."""


def predict_all(plans: Sequence[ShardPlan], table: KernelTable) -> IntArray:
    """int64[plans, cp]: nanoseconds, forward + backward, of one layer's attention and exposed exchange on each rank.

    All `plans` have one CP size.
    """
    times = in_two_calls(plans, table)
    one_call = [index for index, plan in enumerate(plans) if plan.one_call]
    if one_call:
        times[one_call] = in_one_call([plans[index] for index in one_call], table)
    return times


def in_two_calls(plans: Sequence[ShardPlan], table: KernelTable) -> IntArray:
    """As predict_all, as if no plan used one call."""
    rank, piece, start, end, opens = _segments(plans)
    size, ranks = end - start, sum(plan.cp_size for plan in plans)
    diagonal = _per_rank(rank, table.diagonal_ns(size), ranks) + table.call
    longest_segment = np.zeros(ranks)
    np.maximum.at(longest_segment, rank, size)
    diagonal = np.maximum(diagonal, table.call + table.tile_key * longest_segment)
    cached = _cached(plans, rank, piece)
    exchange = _exchange(rank, start, size, opens, cached, ranks, table)
    exposed = np.maximum(exchange - diagonal, 0.0)
    total = diagonal + exposed + _rectangles(rank, start, size, opens, ranks, table)
    return np.rint(total).astype(np.int64).reshape(len(plans), -1)


def in_one_call(plans: Sequence[ShardPlan], table: KernelTable) -> IntArray:
    """As predict_all, as if one bottom-right call computed each rank's segments, with all of the exchange exposed."""
    rank, piece, start, end, opens = _segments(plans)
    # A segment attends to keys [0, end). The rank holds this segment and the piece's earlier ones: (0, 0, 2) (0, 6, 8)
    # attend to 2 and 8 keys, and hold 2 and 4.
    held_keys = np.cumsum(end - start)
    firsts = np.flatnonzero(opens)
    before = held_keys[firsts] - (end - start)[firsts]
    held_keys -= np.repeat(before, np.diff(np.append(firsts, len(rank)))) - _cached(plans, rank, piece)
    ranks = sum(plan.cp_size for plan in plans)
    remote, keys, kernel_ns = (
        _per_rank(rank, values, ranks)
        for values in (end - held_keys, end, table.bottom_right_ns(end - start, end))
    )
    kernel_ns += table.moved_key * keys
    exchange = np.where(remote > 0, table.exchange + table.exchange_row * remote, 0.0)
    call_ns = table.call + ONE_CALL * table.second_call
    return np.rint(call_ns + kernel_ns + exchange).astype(np.int64).reshape(len(plans), -1)


def _segments(
    plans: Sequence[ShardPlan],
) -> tuple[IntArray, IntArray, IntArray, IntArray, npt.NDArray[np.bool_]]:
    """Of each segment int64[n] rank (counted through all plans), piece, start and end, and whether it is its rank's
    first of the piece. A rank's segments of one piece are adjacent, in the piece's order."""
    counts = [len(rows) for plan in plans for rows in plan.ranks]
    rows = np.concatenate([rows for plan in plans for rows in plan.ranks])
    rank = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((rows[:, 1], rows[:, 0], rank))
    rank, piece, start, end = rank[order], *rows[order].T
    opens = np.ones(len(rank), dtype=bool)
    opens[1:] = (rank[1:] != rank[:-1]) | (piece[1:] != piece[:-1])
    return rank, piece, start, end, opens


def _rectangles(
    rank: IntArray, start: IntArray, size: IntArray, opens: np.ndarray, ranks: int, table: KernelTable
) -> np.ndarray:
    """float64[ranks]: nanoseconds of the call on earlier keys: one rectangle per run of keys between a piece's
    segments.
    """
    with_earlier = np.flatnonzero(start > 0)
    if not len(with_earlier):
        return np.zeros(ranks)
    # A segment at 0 is its piece's first; it has no rectangle, so the next one opens the piece.
    opens = opens[with_earlier] | (start[with_earlier - 1] == 0)
    rank, start, size = rank[with_earlier], start[with_earlier], size[with_earlier]
    keys = start - np.where(opens, 0, np.concatenate(([0], start[:-1])))
    # All segments of the piece from this one on are the queries.
    heads = np.flatnonzero(opens)
    tails = np.repeat(np.append(heads[1:], len(rank)), np.diff(np.append(heads, len(rank))))
    before = np.concatenate(([0], np.cumsum(size)))
    queries = before[tails] - before[:-1]
    kernel_ns = _per_rank(rank, table.rectangle_ns(queries, keys), ranks)
    # A call's forward takes at least its longest tile.
    longest_keys = np.zeros(ranks)
    np.maximum.at(longest_keys, rank, keys)
    waits = np.maximum(table.tile_key * longest_keys - kernel_ns * table.forward_share, 0.0)
    return np.where(longest_keys > 0, kernel_ns + waits + table.earlier_call, 0.0)


def _exchange(
    rank: IntArray,
    start: IntArray,
    size: IntArray,
    opens: np.ndarray,
    cached: IntArray,
    ranks: int,
    table: KernelTable,
) -> np.ndarray:
    """float64[ranks]: nanoseconds to fetch keys from other ranks and return their gradients.

    For each piece, a rank needs the keys before its last segment. It already has its own earlier segments and the
    cached keys. Example: segments [0, 2) and [6, 8) need 6 keys and have 2.
    """
    firsts = np.flatnonzero(opens)
    lasts = np.append(firsts[1:], len(rank)) - 1
    own_keys = np.add.reduceat(size, firsts) - size[lasts] + cached[lasts] if len(firsts) else firsts
    remote = _per_rank(rank[lasts], (start[lasts] - own_keys).astype(np.float64), ranks)
    return np.where(remote > 0, table.exchange + table.exchange_row * remote, 0.0)


def _cached(plans: Sequence[ShardPlan], rank: IntArray, piece: IntArray) -> IntArray:
    """int64[n]: keys of its prefix that the rank of each segment has of the segment's piece.

    rank: the segment's, counted through all plans.
    """
    none = np.zeros_like(rank)
    if all(plan.chunks is None for plan in plans):
        return none
    width = max(len(plan.lengths) for plan in plans)
    held_keys = np.zeros(sum(plan.cp_size for plan in plans) * width, dtype=np.int64)
    first = 0
    for plan in plans:
        for rows in () if plan.chunks is None else plan.chunks.cached:
            np.add.at(held_keys, first * width + rows[:, 0], rows[:, 2] - rows[:, 1])
            first += 1
        first += plan.cp_size if plan.chunks is None else 0
    return held_keys[rank * width + piece]


def _per_rank(rank: IntArray, values: np.ndarray, ranks: int) -> np.ndarray:
    return np.bincount(rank, weights=values, minlength=ranks)
