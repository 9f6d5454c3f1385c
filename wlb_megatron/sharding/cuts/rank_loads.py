"""The state of ranks while pieces are assigned: tokens left, load in nanoseconds, kernel calls."""

from __future__ import annotations

from wlb_megatron.workload.kernel_table import KernelTable

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
