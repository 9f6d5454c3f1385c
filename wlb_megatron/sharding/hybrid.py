"""Hybrid sharding: keeps short pieces whole on one rank, and cuts long ones over as many ranks as balance needs.

A whole piece sends no keys and needs one kernel segment. A piece cut over g ranks in causal pairs (rank p of g holds
chunks p and 2g-1-p of 2g) has even work, but costs keys, tiles and kernel calls. Every rank ends with exactly the
same number of tokens: the longest piece, the filler, is placed last and fills what is left on each rank.

There are two forms of filling. In turn: every rank gets one chunk, which is one kernel call. Later chunks attend to
more keys, so the other pieces are placed to leave later ranks fewer free tokens. In pairs: every rank gets an early
and a late chunk, which is two calls. How many of its tokens are early and how many late then evens out the work of
the other pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wlb_megatron.sharding.segments import IntArray, ShardPlan
from wlb_megatron.sharding.slots import PieceList, slot_bounds
from wlb_megatron.workload.kernel_table import KernelTable

GRAINS = (1, 2, 4, 8)
"""Values to try for how finely pieces are cut: a rank's share of a piece may cost at most a rank's fair load divided
by this."""

TRIES = 5
"""The most candidates to try, the most promising first. Over 87 mixes at CP 2 to 16, five come within 1 % of trying
all."""


class _Candidate(NamedTuple):
    """One candidate: over how many ranks each piece is cut, what that costs a rank, and how the filler is cut: in turn,
    or in pairs."""

    least: float
    degree: IntArray
    share_ns: IntArray
    in_turn: bool


def hybrid(pieces: PieceList, cp_size: int, table: KernelTable) -> list[ShardPlan]:
    """The plan of each micro-batch.

    Example: lengths [16, 4, 4, 4, 4], CP=2: each rank holds two short pieces whole and 8 tokens of the long one.
    Raises ValueError if a total is not a positive multiple of cp_size.
    """
    slot_bounds(pieces.totals(), cp_size)  # refuses totals that would leave ranks unequal
    whole_ns = table.diagonal_ns(pieces.lengths)
    chunks = np.flatnonzero(pieces.prefixes * pieces.lengths)
    whole_ns[chunks] += table.rectangle_ns(pieces.lengths[chunks], pieces.prefixes[chunks])
    columns = (np.split(column, pieces.first[1:-1]) for column in (pieces.lengths, pieces.prefixes, whole_ns))
    return [_mix(lengths, before, ns, cp_size, table) for lengths, before, ns in zip(*columns, strict=True)]


def _mix(
    lengths: IntArray, before: IntArray, whole_ns: IntArray, cp_size: int, table: KernelTable
) -> ShardPlan:
    """whole_ns: int64[n], nanoseconds of each piece on one rank."""
    order = np.argsort(-lengths, kind="stable")[: int(np.count_nonzero(lengths))].tolist()
    size, filler = lengths.tolist(), order[0]
    best_ranks: RankLoads | None = None
    candidates = sorted(
        _candidates(lengths, before, whole_ns, filler, cp_size, table), key=lambda mixed: mixed.least
    )
    for candidate in candidates[:TRIES]:
        if best_ranks is not None and 1.01 * candidate.least >= best_ranks.worst():
            break
        mean_price = int(whole_ns[filler]) / size[filler]
        rise = candidate.in_turn * size[filler] / (size[filler] + 2 * int(before[filler]))
        ranks = RankLoads(table, size, filler, token_prices(cp_size, mean_price, rise), before.tolist())
        _place(ranks, order[1:], candidate.degree.tolist(), candidate.share_ns.tolist())
        (fill_in_turn if candidate.in_turn else fill_in_pairs)(ranks)
        if best_ranks is None or ranks.worst() < best_ranks.worst():
            best_ranks = ranks
    assert best_ranks is not None
    return _plan(lengths, before, cp_size, best_ranks.chunks)


def _candidates(
    lengths: IntArray, before: IntArray, whole_ns: IntArray, filler: int, cp_size: int, table: KernelTable
) -> list[_Candidate]:
    """Candidates without duplicates. A piece over two ranks needs one kernel call on each, over more mostly two."""
    fair = int(whole_ns.sum()) // (cp_size * np.array(GRAINS)) + 1
    most_ranks = np.minimum([2, cp_size], cp_size)
    # [grain, most_ranks, piece]
    degrees = np.clip(-(-whole_ns // fair[:, None, None]), 1, most_ranks[:, None])
    degrees[..., filler] = 1  # placed last, in the free tokens: its own degree does not matter
    unlike = {degree.tobytes(): degree for degree in degrees.reshape(-1, len(lengths))}
    degrees = np.stack(list(unlike.values()))
    cut_ns = np.rint(table.cut_ns(whole_ns, lengths, degrees, before))
    # [candidate, piece]: nanoseconds that a piece costs each of the ranks that it is cut over.
    share_ns = np.where(degrees > 1, cut_ns, whole_ns).astype(np.int64)
    means = ((share_ns * degrees).sum(axis=1) / cp_size).tolist()
    candidates = []
    for mean, degree, of_ranks in zip(means, degrees, share_ns, strict=True):
        calls = min(int(degree.max()) - 1, 2)
        in_turn = mean + table.earlier_call * calls
        candidates.append(_Candidate(in_turn, degree, of_ranks, True))
        in_pairs = mean + table.earlier_call * (2 if cp_size > 2 else 1)
        candidates.append(_Candidate(in_pairs, degree, of_ranks, False))
    return candidates


def _place(ranks: RankLoads, order: list[int], degree: list[int], share_ns: list[int]) -> None:
    """Places these pieces, the longest first.

    A piece that does not fit at its degree is cut over more ranks. If it fits at no degree, it is placed last, in
    parts that fill the ranks.
    """
    ranks.expect([share_ns[piece] * degree[piece] for piece in order], [ranks.size[p] for p in order])
    unplaced = []
    for nth, piece in enumerate(order):
        g, ns = degree[piece], share_ns[piece]
        if g == 1 and ranks.put_whole(nth, piece, ns):
            continue
        total = g * ns
        while g <= len(ranks.free) and not ranks.put_cut(nth, piece, g, total // g):
            g += 1
        if g > len(ranks.free):
            unplaced.append(piece)
    for piece in unplaced:
        ranks.put_in_parts(piece, share_ns[piece] * degree[piece])


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


Chunk = tuple[int, int]
"""(rank, tokens). The chunks of a piece follow one another in it."""


class RankLoads:
    """What each rank holds so far. Pieces are placed in a given order, the filler (the longest piece) last.

    Each rank has `free` tokens left, a `load` of nanoseconds so far, and `calls` on earlier keys: the largest number
    of segments, not counting one at the start, that any one piece has on the rank. `chunks` has those of each placed
    piece, `prices` the nanoseconds of one of the filler's tokens on each rank.
    """

    def __init__(
        self, table: KernelTable, size: list[int], filler: int, prices: list[float], before: list[int]
    ) -> None:
        """size, before: tokens of each piece, and earlier tokens that it attends to."""
        ranks = len(prices)
        self.table, self.size, self.filler, self.prices = table, size, filler, prices
        self.before = before
        self.free = [sum(size) // ranks] * ranks
        self.load = [0] * ranks
        self.calls = [0] * ranks
        self.chunks: dict[int, list[Chunk]] = {}
        self._to_come: list[tuple[int, int]] = []

    def expect(self, ns: list[int], tokens: list[int]) -> None:
        """Announces the pieces to be placed, in order, so that the loads can foresee what fills a rank."""
        left_ns, left_tokens = 0, self.size[self.filler]
        for one_ns, one_tokens in zip(reversed(ns), reversed(tokens), strict=True):
            self._to_come.append((left_ns, left_tokens))
            left_ns += one_ns
            left_tokens += one_tokens
        self._to_come.reverse()

    def prices_after(self, nth: int) -> list[float]:
        """Nanoseconds per rank: the mean price of a token among the pieces after the nth and the filler."""
        ns, tokens = self._to_come[nth]
        filler = self.size[self.filler] / tokens
        remaining = ns / tokens
        return [remaining + price * filler for price in self.prices]

    def put_whole(self, nth: int, piece: int, ns: int) -> bool:
        """Places a piece on one rank; returns False if it fits on none.

        If its tokens cost more than what they displace, it goes to the rank that would end lowest, else to the rank
        that would end highest.
        """
        size, load, best_rank, highest = self.size[piece], self.load, -1, 0.0
        prices = self.prices_after(nth)
        costly = ns * len(prices) > size * sum(prices)
        for rank, free_tokens in enumerate(self.free):
            if free_tokens >= size:
                ends = load[rank] + prices[rank] * free_tokens
                if costly:
                    ends = -ends
                if best_rank < 0 or ends > highest:
                    best_rank, highest = rank, ends
        if best_rank < 0:
            return False
        self.free[best_rank] -= size
        self.load[best_rank] += ns
        self.calls[best_rank] = max(self.calls[best_rank], int(self.before[piece] > 0))
        self.chunks[piece] = [(best_rank, size)]
        return True

    def put_cut(self, nth: int, piece: int, g: int, ns: int) -> bool:
        """Places a piece in causal pairs on g ranks, chosen as in put_whole; returns False if it does not fit.

        Example: 10 tokens over ranks 3 and 5: chunks of 3 3 2 2 tokens on ranks 3 5 5 3.
        """
        size = self.size[piece]
        base, extra = divmod(size, 2 * g)
        fitting_ranks = [
            rank for rank, free_tokens in enumerate(self.free) if free_tokens >= 2 * base + min(extra, 2)
        ]
        if len(fitting_ranks) < g:
            return False
        if g < len(fitting_ranks):
            prices = self.prices_after(nth)
            ends = [
                load + price * free_tokens
                for load, price, free_tokens in zip(self.load, prices, self.free, strict=True)
            ]
            costly = g * ns > sum(prices) / len(prices) * size
            fitting_ranks.sort(key=ends.__getitem__, reverse=not costly)
            fitting_ranks = sorted(fitting_ranks[:g])
        self.chunks[piece] = [
            (rank, base + (index < extra)) for index, rank in enumerate(fitting_ranks + fitting_ranks[::-1])
        ]
        for rank, tokens in self.chunks[piece]:
            self.free[rank] -= tokens
        for index, rank in enumerate(fitting_ranks):
            self.load[rank] += ns
            # The first rank's early chunk attends only to the prefix; the last rank's two chunks are one segment.
            both = (index > 0 or self.before[piece] > 0) and index < g - 1
            self.calls[rank] = max(self.calls[rank], 2 if both else 1)
        return True

    def put_in_parts(self, piece: int, ns: int) -> None:
        """Places a piece in parts that fill the ranks, starting with the rank that has the most free tokens."""
        tokens_left = self.size[piece]
        chunks: list[Chunk] = []
        for rank in sorted(range(len(self.free)), key=lambda rank: -self.free[rank]):
            tokens = min(tokens_left, self.free[rank])
            if not tokens:
                break
            self.free[rank] -= tokens
            self.load[rank] += ns * tokens // self.size[piece]
            self.calls[rank] = max(self.calls[rank], int(bool(chunks) or self.before[piece] > 0))
            chunks.append((rank, tokens))
            tokens_left -= tokens
        self.chunks[piece] = chunks

    def worst(self) -> float:
        """The largest load, with its kernel calls, in nanoseconds."""
        return max(load + self.table.call * calls for load, calls in zip(self.load, self.calls, strict=True))


ROUNDS = 4
"""Rounds that correct the number of early tokens. More than one, because each round changes the other ranks' keys a
little."""


def token_prices(ranks: int, mean: float, rise: float) -> list[float]:
    """Nanoseconds of a token on each rank, if rank 0 holds the first chunk and the last rank the last chunk.

    mean: nanoseconds of the mean token. Rank 0's chunk attends to few keys, the last rank's to nearly all: with 4
    ranks 1/4 3/4 5/4 7/4 of the mean. rise: by how much the last token costs more than the mean token, over the mean.
    It is 1 for a whole piece, and less with a prefix, because all tokens attend to the prefix. 0 if chunks come in
    pairs, so that all ranks' tokens cost the mean.
    """
    return [mean * (2 * rank + 1) / ranks * rise + mean * (1 - rise) for rank in range(ranks)]


def fill_in_turn(ranks: RankLoads) -> None:
    """Gives each rank one chunk, in the order of ranks."""
    size, load = ranks.size[ranks.filler], ranks.load
    start = ranks.before[ranks.filler]
    pair_ns = 2.0 * sum(ranks.prices) / len(ranks.prices) / (size + 2 * start)
    chunks = []
    for rank, tokens in enumerate(ranks.free):
        if not tokens:
            continue
        load[rank] += int(pair_ns * tokens * (start + tokens / 2) + ranks.table.earlier_key * start)
        ranks.calls[rank] = max(ranks.calls[rank], int(start > 0))
        chunks.append((rank, tokens))
        start += tokens
    ranks.chunks[ranks.filler] = chunks


def fill_in_pairs(ranks: RankLoads) -> None:
    """Gives each rank an early and a late chunk, with as many early tokens as evens out the loads.

    Example: 4 and 4 tokens left, equal loads: chunks of 2 2 2 2 tokens. If rank 1 has more load: 2 3 1 2.
    """
    size, load = ranks.size[ranks.filler], ranks.load
    begin = ranks.before[ranks.filler]
    end = begin + size
    price = ranks.prices[0]
    filling = [rank for rank, free_tokens in enumerate(ranks.free) if free_tokens]
    ends = [load_done + price * free_tokens for load_done, free_tokens in zip(load, ranks.free, strict=True)]
    mean = sum(ends) / len(ends)
    # Outer chunks differ most between early and late, so the ranks with the most uneven loads get them.
    filling.sort(key=lambda rank: -abs(ends[rank] - mean))
    free_tokens = [ranks.free[rank] for rank in filling]
    early = [tokens // 2 for tokens in free_tokens]
    pair_ns = 2.0 * price / (begin + end)
    for _ in range(ROUNDS):
        first, last, now = _loads([load[rank] for rank in filling], free_tokens, early, begin, end, pair_ns)
        mean = sum(now) / len(now)
        for index, rank_load in enumerate(now):
            # A token moved from early to late attends to this many more keys.
            move = int((rank_load - mean) / (pair_ns * max(last[index] - first[index], 1)))
            early[index] = min(max(early[index] + move, 0), free_tokens[index])
    first, last, now = _loads([load[rank] for rank in filling], free_tokens, early, begin, end, pair_ns)
    for index, rank in enumerate(filling):
        load[rank] = int(now[index] + ranks.table.earlier_key * (first[index] - begin + last[index]))
        inner = (index > 0 or begin > 0) and index < len(filling) - 1
        both = 0 < early[index] < free_tokens[index]
        ranks.calls[rank] = max(ranks.calls[rank], 2 if inner and both else 1)
    late = [rank_tokens - part for rank_tokens, part in zip(free_tokens, early, strict=True)]
    ranks.chunks[ranks.filler] = [
        *zip(filling, early, strict=True),
        *zip(reversed(filling), reversed(late), strict=True),
    ]


def _loads(
    load: list[int], free_tokens: list[int], early: list[int], start: int, end: int, pair_ns: float
) -> tuple[list[int], list[int], list[float]]:
    """Where each rank's early chunk of [start, end) starts, where its late chunk starts, and its load with both."""
    first, last, now = [], [], []
    for base, tokens, before in zip(load, free_tokens, early, strict=True):
        after = tokens - before
        first.append(start)
        last.append(end - after)
        now.append(base + pair_ns * (before * (start + before / 2) + after * (end - after / 2)))
        start += before
        end -= after
    return first, last, now
