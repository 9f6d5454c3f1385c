"""Moves and swaps of pieces between bins, after they were filled greedily."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from wlb_megatron.packing.outlier_queues import Item

PARTNERS = 4


class _Trade(NamedTuple):
    away: int
    """What remains between the two bins."""
    item: Item
    back: Item | None


def improve(
    bins: list[list[Item]], work: list[int], capacity: int, max_documents: int, rounds: int = 16
) -> None:
    """Move a piece from the bin with most work to a light one, or swap two, whichever evens them best, while it
    helps; `bins` and their `work` change in place. None gets more work than the largest had, nor breaks a limit."""
    for _ in range(rounds):
        order = sorted(range(len(bins)), key=work.__getitem__)
        high = order[-1]
        for low in order[: min(PARTNERS, len(bins) - 1)]:
            trade = _best_trade(bins[high], bins[low], work[high] - work[low], capacity, max_documents)
            if trade is not None:
                break
        else:
            break
        moved = _carry_out(trade, bins[high], bins[low])
        work[high] -= moved
        work[low] += moved


def _best_trade(
    high: list[Item], low: list[Item], gap: int, capacity: int, max_documents: int
) -> _Trade | None:
    """The trade after which two bins, now `gap` apart, are closest; None if none brings them closer."""
    tokens_high, tokens_low = (sum(item.tokens for item in items) for items in (high, low))
    theirs = sorted(low)
    works = [item.work for item in theirs]
    may_move = len(high) > 1 and len(low) < max_documents
    best = None
    for item in high:
        if may_move and item.work < gap and tokens_low + item.tokens <= capacity:
            away = abs(gap - 2 * item.work)
            if best is None or away < best.away:
                best = _Trade(away, item, None)
        at = bisect_left(works, item.work - gap // 2)
        for back in theirs[max(at - 1, 0) : at + 2]:
            shift, grow = item.work - back.work, item.tokens - back.tokens
            away = abs(gap - 2 * shift)
            fits = tokens_low + grow <= capacity and tokens_high - grow <= capacity
            if fits and away < (gap if best is None else best.away):
                best = _Trade(away, item, back)
    return best


def _carry_out(trade: _Trade, high: list[Item], low: list[Item]) -> int:
    """Returns the work moved from `high` to `low`."""
    high.remove(trade.item)
    low.append(trade.item)
    if trade.back is None:
        return trade.item.work
    low.remove(trade.back)
    high.append(trade.back)
    return trade.item.work - trade.back.work
