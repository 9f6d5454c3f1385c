"""Decides which waiting outliers train now: those that balance this iteration, at the price of making others wait.

If an iteration has one outlier, all other ranks wait for it. Several outliers of similar work side by side keep
nobody waiting. So each waiting document proposes its work as a height of this iteration ("ceiling"). Under that
ceiling the queues are emptied into the bins, longest level first, and short documents fill up. The cost is the
remaining imbalance. The gain is that outliers stop waiting: `price` per unit of work and iteration, and more as the
document nears its bound on delay.

Example: 2 bins, waiting works 9 and 8, short documents of 3 in all. Ceiling 0 gives bins 1.5 | 1.5, even. Ceiling 9
gives 9 | 8 + 3 = 11. Ceiling 8 gives 8 | 3, uneven. So 9 and 8 train together.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from wlb_megatron.packing.varlen.bins import UNBOUNDED, Bins
from wlb_megatron.packing.varlen.outlier_queues import OutlierQueues

SCALE = 1 << 20
"""Imbalance and prices are integers in units of 1 / SCALE."""

STRETCH = (105, 120)
"""The best ceiling is also tried this many percent higher: two middling documents may together exceed a long one a
little."""

URGENCY = SCALE // 5
"""Added to the price when a document reaches its bound on delay; it grows with the square of its age."""

HELD_SHORT = SCALE // 10
"""Price per unit of work of short documents that do not fit."""

FULL, THIN = 60, 2 * SCALE
"""An iteration below FULL percent of a global batch's tokens costs THIN times the square of its shortfall (as a share
of the global batch). Batches far smaller than asked for are bad for training, whatever their balance. At 30 % it is
(0.6 - 0.3) ** 2 * 2 = 0.18 of imbalance, at 50 % 0.02. With FULL = 80, corpora of long documents lost balance."""


class Situation(NamedTuple):
    """What the choice depends on besides the queues. Works are in the cost model's units, summed over documents."""

    iteration: int
    max_delay: int
    price: int
    mean_work: int
    """Of one iteration, all bins."""
    short_work: int
    short_tokens: int
    short_largest: int
    global_tokens: int
    """Of a global batch: bins x window."""
    most_tokens: int = UNBOUNDED
    """That the step may train."""


class ReleaseChoice(NamedTuple):
    counts: list[int]
    """How many of each level train now, oldest first."""
    bins: Bins
    """With all that is placed so far."""


def choose_release(queues: OutlierQueues, must: ReleaseChoice, now: Situation) -> ReleaseChoice:
    """`must` (what trains in any case, already placed) and the outliers that are best released with it."""
    heights = [max(item.work for item in level) for level in queues.levels if level]
    floor = max(must.bins.work)
    ceilings = [floor, *(height for height in heights if height > floor)]
    room = now.most_tokens - sum(must.bins.tokens)
    best = max(
        ((_value(c := _fill(queues, must, h, room), queues, now), -i, h, c) for i, h in enumerate(ceilings))
    )
    for percent in STRETCH:
        choice = _fill(queues, must, best[2] * percent // 100, room)
        value = _value(choice, queues, now)
        if value > best[0]:
            best = (value, best[1], best[2], choice)
    return best[3]


def _fill(queues: OutlierQueues, must: ReleaseChoice, ceiling: int, room: int) -> ReleaseChoice:
    """Empties the queues into the bins under the ceiling, longest level first, each until its oldest does not fit.
    room: tokens that this may add."""
    bins, counts = must.bins.copy(), must.counts.copy()
    for i in reversed(range(len(counts))):
        for item in islice(queues.levels[i], counts[i], None):
            if item.tokens > room or not bins.add(item, ceiling):
                break
            counts[i] += 1
            room -= item.tokens
    return ReleaseChoice(counts, bins)


def _value(choice: ReleaseChoice, queues: OutlierQueues, now: Situation) -> int:
    """Gain of what is released minus the imbalance it leaves, in 1 / SCALE. Integers, so that all ranks agree."""
    gain = 0
    for level, count in zip(queues.levels, choice.counts, strict=True):
        for item in islice(level, count):
            age = now.iteration - item.entry
            gain += item.work * (now.price + URGENCY * age * age // (now.max_delay * now.max_delay or 1))
    placed = sum(choice.bins.tokens)
    tokens = min(now.short_tokens, max(0, now.most_tokens - placed))
    largest, total = choice.bins.poured(now.short_work * tokens // max(now.short_tokens, 1), tokens)
    if not total:
        return 0
    largest = max(largest, now.short_largest)
    held = now.short_work + sum(choice.bins.work) - total
    imbalance = largest * len(choice.bins.work) * SCALE // total - SCALE
    missing = max(0, now.global_tokens * FULL // 100 - placed - tokens)
    thin = missing * missing * THIN // (now.global_tokens * now.global_tokens)
    return (gain - held * HELD_SHORT) // max(now.mean_work, 1) - imbalance - thin
