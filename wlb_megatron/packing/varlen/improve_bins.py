"""Improves greedily filled bins by moving and swapping pieces between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.packing.varlen.outlier_queues import Item

IntArray = npt.NDArray[np.int64]

PARTNERS = 4

_NONE = np.iinfo(np.int64).max


class _Trade(NamedTuple):
    item: Item
    back: Item | None


class _Bin:
    """A bin's items as arrays, in the order of filling; `ranked`: their places by (work, tokens, serial)."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        work, tokens, serial, _, _ = zip(*items, strict=True) if items else ((),) * 5
        self.work, self.tokens, by_age = (np.array(of, dtype=np.int64) for of in (work, tokens, serial))
        self.total = int(self.tokens.sum())
        self.ranked = np.lexsort((by_age, self.tokens, self.work))


def improve_bins(
    bins: list[list[Item]], work: list[int], capacity: int, max_documents: int, rounds: int = 16
) -> None:
    """Move a piece from the bin with most work to a light one, or swap two, whichever evens them best, while it
    helps; `bins` and their `work` change in place. None gets more work than the largest had, nor breaks a limit."""
    seen: dict[int, _Bin] = {}
    for _ in range(rounds):
        order = sorted(range(len(bins)), key=work.__getitem__)
        high = order[-1]
        for low in order[: min(PARTNERS, len(bins) - 1)]:
            for at in (high, low):
                if at not in seen:
                    seen[at] = _Bin(bins[at])
            trade = _best_trade(seen[high], seen[low], work[high] - work[low], capacity, max_documents)
            if trade is not None:
                break
        else:
            break
        moved = _carry_out(trade, bins[high], bins[low])
        work[high] -= moved
        work[low] += moved
        del seen[high], seen[low]


def _best_trade(high: _Bin, low: _Bin, gap: int, capacity: int, max_documents: int) -> _Trade | None:
    """The trade after which two bins, now `gap` apart, are closest; None if none brings them closer.

    Each item of `high` may move (column 0), or be swapped for one of the three of `low` around (its work - gap / 2).
    Of equal trades the first item's counts, and of that the first column.
    """
    if not high.items:
        return None
    away = np.full((len(high.items), 4), _NONE)
    if len(high.items) > 1 and len(low.items) < max_documents:
        fits = (high.work < gap) & (low.total + high.tokens <= capacity)
        away[fits, 0] = np.abs(gap - 2 * high.work[fits])
    works, tokens = low.work[low.ranked], low.tokens[low.ranked]
    near = np.searchsorted(works, high.work - gap // 2)[:, None] + np.arange(-1, 2)
    if len(works):
        back = near.clip(0, len(works) - 1)
        grow = high.tokens[:, None] - tokens[back]
        left = np.abs(gap - 2 * (high.work[:, None] - works[back]))
        fits = (
            (near == back) & (low.total + grow <= capacity) & (high.total - grow <= capacity) & (left < gap)
        )
        away[:, 1:][fits] = left[fits]
    row, column = divmod(int(away.argmin()), 4)
    if away[row, column] == _NONE:
        return None
    partner = None if column == 0 else low.items[low.ranked[near[row, column - 1]]]
    return _Trade(high.items[row], partner)


def _carry_out(trade: _Trade, high: list[Item], low: list[Item]) -> int:
    """Returns the work moved from `high` to `low`."""
    high.remove(trade.item)
    low.append(trade.item)
    if trade.back is None:
        return trade.item.work
    low.remove(trade.back)
    high.append(trade.back)
    return trade.item.work - trade.back.work
