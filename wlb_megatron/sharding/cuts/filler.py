"""Cuts the longest piece of a micro-batch (the filler) to fill exactly the tokens that are left on each rank.

There are two forms. In turn: every rank gets one chunk, which is one kernel call. Later chunks attend to more keys,
so the other pieces are placed to leave later ranks fewer free tokens. In pairs: every rank gets an early and a late
chunk, which is two calls. How many of its tokens are early and how many late then evens out the work of the other
pieces.
"""

from __future__ import annotations

from wlb_megatron.sharding.cuts.rank_loads import RankLoads

ROUNDS = 4
"""Rounds that correct the number of early tokens. More than one, because each round changes the other ranks' keys a
little."""


def prices_in_turn(ranks: int, mean: float, rise: float = 1.0) -> list[float]:
    """Nanoseconds of a token on each rank, if rank 0 holds the first chunk and the last rank the last chunk.

    mean: nanoseconds of the mean token. Rank 0's chunk attends to few keys, the last rank's to nearly all: with 4
    ranks 1/4 3/4 5/4 7/4 of the mean. rise: by how much the last token costs more than the mean token, over the mean.
    It is 1 for a whole piece, and less with a prefix, because all tokens attend to the prefix.
    """
    return [mean * (2 * rank + 1) / ranks * rise + mean * (1 - rise) for rank in range(ranks)]


def prices_in_pairs(ranks: int, mean: float, rise: float = 1.0) -> list[float]:
    return [mean] * ranks


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
