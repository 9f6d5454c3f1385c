"""The kernel calls that compute attention for a rank's segments: two, or one if a plan asks for that (WindowLayout).

A segment of tokens [start, end) attends to its piece's keys [0, end): its own diagonal, and all earlier keys.

* diagonals: one causal call over all segments of the rank, on the rank's own keys. It runs while other keys travel.
* rectangles: one call without a mask over the exchanged keys. Let a piece's segments start at s1 < s2 < .. All of
  them attend to keys [0, s1), all but the first to [s1, s2), and so on. Each of these runs of keys is one rectangle,
  with its queries copied side by side. No key is in two rectangles, so dK and dV are exact, and each row of each
  buffer is written once.

Log-sum-exp merges the parts of a query's attention. Both calls are plain variable-length attention.

For each piece, a rank needs the keys before its last segment. Its diagonals read its own keys. A piece that one rank
holds whole sends nothing, because no other rank needs its keys. Of a document in chunks, keys stay on the rank that
computed them, and travel again to each later chunk (docs/attention.md has the figures).

All is computed here, on the host. attention/device_layout.py copies the arrays of these records to a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.sharding.segments import IntArray, ShardPlan, _ranges

Int32Array = npt.NDArray[np.int32]
Array = Any
"""An integer array, or the int32 tensor on a device that device_layout makes of it."""


@dataclass(frozen=True)
class AttentionCall:
    """One variable-length call over b sequences; each sequence's queries and keys are contiguous.

    * causal: queries are the last of their sequence's keys, and none attends to a later key.
    * window: earlier keys that a query attends to, None for all.
    * cu_seqlens_q, cu_seqlens_kv: int32[b + 1], in tokens. If one is the other, queries and keys are the same rows.
    * max_q, max_kv: the longest sequence's queries and keys, in tokens.
    * q_rows, kv_rows: total queries and keys of all sequences. The call's buffers may have more rows
      (sharded_attention.Kernels.buffer_rows).
    * sizes: (queries, keys) of each sequence, for backends that loop over sequences.
    * equal: (sequences, queries of each, keys of each) if all sequences have the same sizes, else None.
    """

    causal: bool
    window: int | None
    cu_seqlens_q: Array
    cu_seqlens_kv: Array
    max_q: int
    max_kv: int
    q_rows: int
    kv_rows: int
    sizes: tuple[tuple[int, int], ...]
    equal: tuple[int, int, int] | None = None


def varlen_call(
    queries: IntArray, keys: IntArray, *, causal: bool = True, window: int | None = None
) -> AttentionCall:
    """The call over b sequences. queries, keys: int64[b] each, tokens per sequence; one array if they are the same
    rows."""
    sizes = tuple(zip(queries.tolist(), keys.tolist(), strict=True))
    bounds = _bounds(queries)
    return AttentionCall(
        causal,
        window,
        bounds,
        bounds if keys is queries else _bounds(keys),
        int(queries.max(initial=0)),
        int(keys.max(initial=0)),
        int(queries.sum()),
        int(keys.sum()),
        sizes,
        (len(sizes), *sizes[0]) if len(set(sizes)) == 1 else None,
    )


def _bounds(sizes: IntArray) -> Int32Array:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)


# Two H100s, 8 / 2 heads: at 3,600 pairs a key hiding the return saved 1 ms of 19, at 8,000 it cost 4 to 8 ms of 68.
PAIRS_WORTH_A_KEY = 4096


@dataclass(frozen=True)
class AttentionLayout:
    """What one rank computes for one micro-batch.

    * tokens: t, the rank's token count. longest: tokens of the micro-batch's longest piece, prefix included.
    * positions: int64[t], inside their pieces.
    * diagonals: the causal call on the t local rows.
    * rectangles: the call without a mask, or None if there are no earlier keys. Its queries are the local rows
      query_rows, in which a row appears once per run of earlier keys that it attends to. Its keys are the exchanged
      ones. queries: the inverse of query_rows, by local row.
    * exchange: on a device None if no rank needs earlier keys.
    * hide_return: whether gradients of exchanged keys travel back during the backward of the diagonals, the same on
      all ranks. If one rank's rectangles end long before another's, its transfer waits on the device and slows the
      diagonals beside it (two H100s: by 4 to 10 ms of 70). In that case all ranks return gradients last.
    * window: the layout of windowed layers, if the model has any.
    * single: the layout of the other layers, if the plan computes them in one call. Diagonals, rectangles and
      exchange are then unused.
    * cache: keys of earlier chunks for diagonals and rectangles. None if the micro-batch shares no document with
      another, or if `single` is used.
    """

    tokens: int
    longest: int
    positions: Array
    diagonals: AttentionCall
    rectangles: AttentionCall | None
    query_rows: Array
    queries: RowGroups
    exchange: ExchangePlan | None
    hide_return: bool
    window: WindowLayout | None = None
    single: WindowLayout | None = None
    cache: CachedKeys | None = None


def attention_layout(plan: ShardPlan, rank: int, window: int | None = None) -> AttentionLayout:
    """The layout of `rank`. window: earlier keys that a query of a windowed layer attends to, or None.

    Example: piece [8], CP=2. Rank 0 holds (0, 0, 2) (0, 6, 8): diagonals of 2 and 2 rows, and one rectangle, rows 2 3
    on keys [0, 6). Rank 1 holds (0, 2, 6) as one segment: a diagonal of 4, and a rectangle of rows 0 1 2 3 on keys
    [0, 2). With (0, 1, 2) (0, 4, 6) instead: rows 0 1 2 on key [0, 1), then rows 1 2 on keys [1, 4).

    Raises ValueError if the tokens do not fit the kernels' int32 offsets.
    """
    if plan.key_starts[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"a micro-batch of {int(plan.key_starts[-1])} tokens exceeds the kernels' int32 offsets: lower max_tokens"
        )
    rows = plan.ranks[rank]
    size = rows[:, 2] - rows[:, 1]
    first_row = np.cumsum(size) - size

    # Segments with earlier keys, sorted by piece and start. From any i on, chosen[i:last[i]] are of one piece.
    with_earlier = np.flatnonzero(rows[:, 1] > 0)
    with_earlier = with_earlier[np.lexsort((rows[with_earlier, 1], rows[with_earlier, 0]))]
    piece, start = rows[with_earlier, 0], rows[with_earlier, 1]
    count = len(with_earlier)
    last = np.searchsorted(piece, piece, side="right")
    opens = np.ones(count, dtype=bool)
    opens[1:] = piece[1:] != piece[:-1]
    key_start = np.where(opens, 0, np.concatenate(([0], start[:-1]))[:count])
    # Rectangle i: queries of segments i .. last of its piece, keys [key_start, start).
    members = with_earlier[_ranges(np.arange(count), last)]
    query_rows = _ranges(first_row[members], first_row[members] + size[members])
    running = np.concatenate(([0], np.cumsum(size[with_earlier])))
    queries = running[last] - running[:-1]
    buffer = _ranges(plan.key_starts[piece] + key_start, plan.key_starts[piece] + start)
    reaches = [_reach(plan, rank_rows) for rank_rows in plan.ranks]
    tokens, cache = int(size.sum()), None if plan.one_call else cached_keys(plan, rank)
    (groups,) = row_groups(query_rows, tokens)
    return AttentionLayout(
        tokens,
        int((plan.prefixes + plan.lengths).max()),
        plan.positions(rank),
        varlen_call(size, size),
        varlen_call(queries, start - key_start, causal=False) if count else None,
        query_rows,
        groups,
        exchange_plan(plan, rank, reaches, buffer, cache),
        _in_step(plan, reaches),
        None if window is None else window_layout(plan, rank, window),
        window_layout(plan, rank, None) if plan.one_call else None,
        cache,
    )


def _in_step(plan: ShardPlan, reaches: Sequence[IntArray]) -> bool:
    """Whether the ranks' rectangles end so close together that the early rank waits less than hiding the transfer
    saves.

    That is the case if the ranks' rectangles differ by at most 4096 query-key pairs per key, for the keys of the rank
    that fetches most. The answer is the same for all ranks, because a rank that returns early would wait for one that
    returns late.
    """
    pairs = [int((rows[:, 1] * (rows[:, 2] - rows[:, 1])).sum()) for rows in plan.ranks]
    return max(pairs) - min(pairs) <= PAIRS_WORTH_A_KEY * max(int(reach.sum()) for reach in reaches)


def _reach(plan: ShardPlan, rows: IntArray) -> IntArray:
    """int64[pieces]: where the rank's last segment of each piece begins. It needs that many keys of the piece."""
    reach = np.zeros(len(plan.lengths), dtype=np.int64)
    np.maximum.at(reach, rows[:, 0], rows[:, 1])
    return reach


@dataclass(frozen=True)
class WindowLayout:
    """One kernel call for all of a rank's segments, used when few keys precede each segment.

    In a layer with a sliding window, a segment [start, end) attends to keys [max(0, start - window), end) of its piece.
    Few of these are on other ranks. In any layer, a short piece has few keys (cut.in_fewest_calls). The call is causal,
    bottom-right aligned, over a buffer with each segment's keys, so nothing needs merging. Segments of one piece that
    are closer than the window share keys. Each gets its own copy, so dK and dV are exact, and the owner adds them up.

    call: bottom-right causal, the rank's rows on the exchanged keys. exchange: on a device None if the keys are the
    rank's own, in order. cache: None if the micro-batch shares no document with another.
    """

    call: AttentionCall
    exchange: ExchangePlan | None
    cache: CachedKeys | None = None


def window_layout(plan: ShardPlan, rank: int, size: int | None) -> WindowLayout:
    """The windowed layout of `rank`.

    Piece [8], CP=2, window 1. Rank 0 holds (0, 0, 2) (0, 6, 8): 2 rows on keys 0 1, 2 rows on keys 5 6 7, of which
    5 comes from rank 1. Rank 1 holds (0, 2, 6): 4 rows on keys 1 .. 5.
    """
    rows = plan.ranks[rank]
    cache, buffers = (
        cached_keys(plan, rank, size),
        [_buffer(plan, rank_rows, size) for rank_rows in plan.ranks],
    )
    exchange = exchange_buffers(plan, rank, buffers, cache, size)
    queries = rows[:, 2] - rows[:, 1]
    keys = rows[:, 2] - _first_key(rows, size) if exchange.used else queries
    call = varlen_call(queries, keys, window=size)
    return WindowLayout(call, exchange, cache)


def _first_key(rows: IntArray, size: int | None) -> IntArray:
    return np.zeros_like(rows[:, 1]) if size is None else np.maximum(rows[:, 1] - size, 0)


def _buffer(plan: ShardPlan, rows: IntArray, size: int | None) -> IntArray:
    """int64[n]: the keys that a rank's segments attend to, segment by segment, numbered as in ShardPlan.key_index."""
    begins = plan.key_starts[rows[:, 0]]
    return _ranges(begins + _first_key(rows, size), begins + rows[:, 2])


@dataclass(frozen=True)
class RowGroups:
    """Which rows of a source belong to which row of a target.

    Target row targets[i] owns source rows members[bounds[i] : bounds[i + 1]], in order, at least one. A member j
    below 0 is row ~j of a second source, which holds what arrives from other ranks.
    """

    targets: Array
    bounds: Array
    members: Array


def row_groups(owner: IntArray, *parts: int, source: IntArray | None = None) -> tuple[RowGroups, ...]:
    """The groups of each part of the rows that `owner` counts through.

    owner: int64, the target row of each source row. parts: rows of each part. source: int64, the source row of each
    owner; None: its index.

    Example: owners [3, 0, 3] of 4 rows: targets 0 3, members 1 | 0 2. With parts of 2 and 2 rows: target 0, member 1,
    then target 1, members 0 2.
    """
    counts, members = np.bincount(owner, minlength=sum(parts)), np.argsort(owner, kind="stable")
    # Half the bytes, where a loader worker sends them.
    members = (members if source is None else source[members]).astype(np.int32)
    part_groups, row, member_offset = [], 0, 0
    for rows in parts:
        targets = np.flatnonzero(counts[row : row + rows])
        bounds = np.concatenate(([0], np.cumsum(counts[row + targets])))
        part_groups.append(RowGroups(targets, bounds, members[member_offset : member_offset + bounds[-1]]))
        row, member_offset = row + rows, member_offset + bounds[-1]
    return tuple(part_groups)


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's part in the exchange of one micro-batch.

    * send_rows: int64[s], the rows that it sends, as indices into the rows that it holds (ShardPlan.held_keys), ordered
      by receiver.
    * send_counts, recv_counts: rows to and from each rank; 0 for the rank itself.
    * place: int64[n], the source of row i of the key buffer. If place[i] >= 0, it is that row of those that the rank
      holds; else it is row ~place[i] (-1 - place[i]) of all that arrives, ordered by sender.
    * arrivals: the buffer rows of what arrives, in order of arrival; their gradients go back.
    * returns: for each of the rank's own rows, then for each row of CachedKeys.takes, the rows whose gradients belong
      to it: buffer rows, and below 0 the rows that come back.
    * remote: some rank sends something to another. If not, no rank communicates.
    * used: some rank does, or this one reads keys from a buffer.

    On a device, send_rows and arrivals are slices if their rows are consecutive (a view suffices).
    """

    send_rows: Array
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    place: Array
    arrivals: Array
    returns: tuple[RowGroups, ...]
    remote: bool
    used: bool


def exchange_plan(
    plan: ShardPlan, rank: int, reaches: Sequence[IntArray], buffer: IntArray, cache: CachedKeys | None
) -> ExchangePlan:
    """The part of `rank` in the exchange.

    reaches: for each rank, int64[pieces], how many first keys of each piece it needs. buffer: int64[n], the keys that
    `rank` needs, numbered as in ShardPlan.key_index, in the order in which it wants them. `cache` has its cached keys.

    Example: pieces [4]; rank 0 holds (0, 0, 1) (0, 3, 4), rank 1 (0, 1, 3); rank 0 needs 3 tokens, rank 1 needs 1.
    Rank 0 sends row 0 to rank 1. Rank 1 sends rows 0, 1 to rank 0, whose buffer is its own row 0, then both.
    """
    held_rows = [plan.held_keys(holder) for holder in range(plan.cp_size)]
    size = held_rows[rank][:, 2] - held_rows[rank][:, 1]
    sent_rows = [_first_tokens(np.cumsum(size) - size, held_rows[rank], reach) for reach in reaches]
    arrived = [
        _first_tokens(plan.key_starts[rows[:, 0]] + rows[:, 1], rows, reaches[rank]) for rows in held_rows
    ]
    comes_from = np.empty(plan.key_starts[-1], dtype=np.int64)
    comes_from[arrived[rank]] = sent_rows[rank]
    sent_rows[rank] = arrived[rank] = sent_rows[rank][:0]
    remote_index = np.concatenate(arrived)
    comes_from[remote_index] = ~np.arange(len(remote_index))
    needed_keys = sum(int(reach.sum()) for reach in reaches)
    at_home = sum(int(_inside(rows, reach).sum()) for rows, reach in zip(held_rows, reaches, strict=True))
    parts, remote = _parts(plan, rank, cache), needed_keys > at_home
    return exchange_part(
        *(rank, sent_rows, map(len, arrived), comes_from[buffer], parts),
        remote=remote,
        used=remote or len(buffer) > 0,
    )


def _inside(rows: IntArray, reach: IntArray) -> IntArray:
    """int64[k]: how many first tokens of each segment are among its piece's first reach[piece] tokens."""
    return np.clip(reach[rows[:, 0]] - rows[:, 1], 0, rows[:, 2] - rows[:, 1])


def _first_tokens(first: IntArray, rows: IntArray, reach: IntArray) -> IntArray:
    """The numbers of these tokens, if each segment's are counted from `first`."""
    return _ranges(first, first + _inside(rows, reach))


def exchange_buffers(
    plan: ShardPlan,
    rank: int,
    buffers: Sequence[IntArray],
    cache: CachedKeys | None,
    window: int | None = None,
) -> ExchangePlan:
    """The part of `rank` if each rank wants any keys, in any order and any number of times.

    `buffers` has for each rank, int64[n], the keys it wants, numbered as in ShardPlan.key_index. `cache` has those that
    `rank` has cached. The layers' `window` decides which ranks hold keys of prefixes.

    Example: tokens [0, 1] on rank 0 and [2, 3] on rank 1; rank 0 wants 1 2 1. Rank 1 sends it row 0. Rank 0's buffer
    is its own row 1, the row that arrived, and row 1 again.
    """
    owner, local = np.empty((2, plan.key_starts[-1]), dtype=np.int64)
    for holder in range(plan.cp_size):
        index = plan.key_index(plan.held_keys(holder, window))
        owner[index], local[index] = holder, np.arange(len(index))
    owners = [owner[tokens] for tokens in buffers]
    elsewhere = [holders != wanting for wanting, holders in enumerate(owners)]
    place = local[buffers[rank]]
    arriving = np.flatnonzero(elsewhere[rank])
    place[arriving[np.argsort(owners[rank][arriving], kind="stable")]] = ~np.arange(len(arriving))
    sent_rows = [
        local[tokens[(holders == rank) & away]]
        for tokens, holders, away in zip(buffers, owners, elsewhere, strict=True)
    ]
    received = np.bincount(owners[rank][arriving], minlength=plan.cp_size).tolist()
    remote = any(bool(away.any()) for away in elsewhere)
    parts = _parts(plan, rank, cache)
    # Without any exchange all pieces are whole on a rank, and its keys are its own, in order.
    used = remote or len(parts) > 1
    return exchange_part(rank, sent_rows, received, place, parts, remote=remote, used=used)


def _parts(plan: ShardPlan, rank: int, cache: CachedKeys | None) -> list[int]:
    """Rows of each part that a rank holds: its own, then those of each entry that it reads from its cache."""
    return [plan.tokens_per_rank[rank], *(take.rows for take in (cache.takes if cache else ()))]


def exchange_part(
    rank: int,
    sent_rows: Sequence[IntArray],
    received: Iterable[int],
    place: IntArray,
    parts: Sequence[int],
    *,
    remote: bool,
    used: bool,
) -> ExchangePlan:
    """The part of `rank`.

    Args:
        sent_rows: int64 each, the rows that go to each rank.
        received: rows from each rank.
        place, remote, used: see ExchangePlan.
        parts: rows of each target of what comes back; sent_rows count through them.
    """
    send_rows, send_counts = np.concatenate(sent_rows), tuple(map(len, sent_rows))
    local, arriving, first = np.flatnonzero(place >= 0), np.flatnonzero(place < 0), sum(send_counts[:rank])
    returns: tuple[RowGroups, ...] = ()
    if used:
        # In rank order, so that a sum does not depend on which of its rows come from other ranks.
        back = ~np.arange(len(send_rows))
        owner = np.concatenate((send_rows[:first], place[local], send_rows[first:]))
        source = np.concatenate((back[:first], local, back[first:]))
        returns = row_groups(owner, *parts, source=source)
    # Example: place [~1, 0, ~0] has arrivals 2 0.
    arrivals = arriving[np.argsort(~place[arriving])]
    return ExchangePlan(send_rows, send_counts, tuple(received), place, arrivals, returns, remote, used)


class Taken(NamedTuple):
    """All keys (a number of rows) that a rank keeps of one piece of an earlier micro-batch."""

    micro_batch: int
    piece: int
    rows: int


@dataclass(frozen=True)
class Kept:
    """A piece whose keys the rank keeps for later micro-batches.

    rows: int64[k], the rank's own rows of it; None if these are all its rows, in order, of which none need be copied.
    """

    piece: int
    rows: Array | None


@dataclass(frozen=True)
class CachedKeys:
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
            keeps.append(Kept(piece, None if len(rows) == size.sum() else rows))
    return CachedKeys(plan.chunks.micro_batch, tuple(takes), tuple(keeps), bool(plan.prefixes.any()))
