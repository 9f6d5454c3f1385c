"""Decides which waiting outliers train now: those that balance this iteration, at the price of making others wait.

If an iteration has one outlier, all other ranks wait for it. Several outliers of similar work side by side keep
nobody waiting. So each waiting document proposes its work as a height of this iteration ("ceiling"). Under that
ceiling the queues are emptied into the bins, longest level first, and short documents fill up. The cost is the
remaining imbalance. The gain is that outliers stop waiting: `price` per unit of work and iteration, and more as the
document nears its bound on delay.

Example: 2 bins, waiting works 9 and 8, short documents of 3 in all. Ceiling 0 gives bins 1.5 | 1.5, even. Ceiling 9
gives 9 | 8 + 3 = 11. Ceiling 8 gives 8 | 3, uneven. So 9 and 8 train together.

With as many micro-batches as the pipeline wants (choose_height), an outlier keeps no other micro-batch waiting. Its
cost is that the pipeline fills and drains at its pace: (pp - 1) / vpp times its work, once for all outliers up to that
work. So each level of the queues proposes its largest work as a height, and everything that waits up to that height is
released with it. The height with the least predicted step, over the same work without a bubble, wins, against the price
of waiting.

Example: a pipeline of 4, waiting works 9 and 8, 12 of other work. Releasing nothing costs 3 * 1 / 12 (12
micro-batches of 1) = 0.25 of the work; 8 alone costs 3 * 8 / 20 = 1.2; 9 and 8 together cost 3 * 9 / 29 = 0.93.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from wlb_megatron.packing.varlen.items import SCALE, UNBOUNDED, Bins, Item, OutlierQueues
from wlb_megatron.pipeline.step_law import StepLaw

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
    best_choice = max(
        ((_value(c := _fill(queues, must, h, room), queues, now), -i, h, c) for i, h in enumerate(ceilings))
    )
    for percent in STRETCH:
        choice = _fill(queues, must, best_choice[2] * percent // 100, room)
        value = _value(choice, queues, now)
        if value > best_choice[0]:
            best_choice = (value, best_choice[1], best_choice[2], choice)
    return best_choice[3]


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
    largest_work, total = choice.bins.poured(now.short_work * tokens // max(now.short_tokens, 1), tokens)
    if not total:
        return 0
    largest_work = max(largest_work, now.short_largest)
    short_left = now.short_work + sum(choice.bins.work) - total
    imbalance = largest_work * len(choice.bins.work) * SCALE // total - SCALE
    missing = max(0, now.global_tokens * FULL // 100 - placed - tokens)
    thin = missing * missing * THIN // (now.global_tokens * now.global_tokens)
    return (gain - short_left * HELD_SHORT) // max(now.mean_work, 1) - imbalance - thin


MOST = 200
"""Outliers bring an iteration to at most this percentage of a global batch's tokens, whatever --wlb-batch-spread."""

RISE = 4
"""Factor on the price of waiting. A pipeline's bubble is a larger share of a step than imbalance is, and the price
should start near the value that keeps the mean delay at its aim."""


class PackedWork(NamedTuple):
    """Summed work and tokens of what trains so far, and the largest document's work."""

    work: int
    tokens: int
    largest: int

    def with_item(self, item: Item) -> PackedWork:
        return PackedWork(self.work + item.work, self.tokens + item.tokens, max(self.largest, item.work))


def choose_height(
    queues: OutlierQueues,
    due_counts: Sequence[int],
    lot: PackedWork,
    now: Situation,
    law: StepLaw,
    counts: Sequence[int],
    dp: int,
) -> list[int]:
    """How many of each level train now, oldest first; at least `due_counts` of each.

    lot: the due documents and everything else that trains in any case. counts: numbers of micro-batches that a rank
    may get. dp: data-parallel ranks.
    """

    # Outliers may take the place of short documents, which then wait for the next iteration.
    token_limit = min(now.most_tokens + now.short_tokens, now.global_tokens * MOST // 100)

    def value(height: int) -> tuple[int, list[int]]:
        released, after, gain = list(due_counts), lot, 0
        for level in reversed(range(len(released))):
            for item in islice(queues.levels[level], released[level], None):
                if item.work > height or after.tokens + item.tokens > token_limit:
                    break
                released[level] += 1
                after = after.with_item(item)
                age = now.iteration - item.entry
                gain += item.work * (
                    RISE * now.price + URGENCY * age * age // (now.max_delay * now.max_delay or 1)
                )
        excess = min(max(0, after.tokens - now.most_tokens), now.short_tokens)
        waits = now.short_work * excess // max(now.short_tokens, 1)
        gain -= waits * HELD_SHORT
        after = after._replace(work=after.work - waits, tokens=after.tokens - excess)
        return gain // max(now.mean_work, 1) - _cost(after, now, law, counts, dp), released

    heights = [lot.largest, *(max(item.work for item in level) for level in queues.levels if level)]
    # On a tie the first wins: the lowest height that was proposed.
    return max((value(height) for height in sorted(set(heights))), key=lambda choice: choice[0])[1]


def _cost(lot: PackedWork, now: Situation, law: StepLaw, counts: Sequence[int], dp: int) -> int:
    """A step's time in excess of its documents' work, as a share of that work, plus the cost of a thin batch; in 1 /
    SCALE.
    """
    if not lot.work:
        return 0
    share = lot.work // dp  # of one rank
    extra = min(law.estimate(count, share, lot.largest) for count in counts) - share
    missing = max(0, now.global_tokens * FULL // 100 - lot.tokens)
    thin = missing * missing * THIN // (now.global_tokens * now.global_tokens)
    return extra * SCALE // max(share, 1) + thin
