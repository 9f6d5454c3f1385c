"""Decides which waiting outliers train now if the number of micro-batches is free: those up to a height of work.

With as many micro-batches as the pipeline wants, an outlier keeps no other micro-batch waiting. Its cost is that the
pipeline fills and drains at its pace: (pp - 1) / vpp times its work, once for all outliers up to that work. So each
level of the queues proposes its largest work as a height, and everything that waits up to that height is released
with it. The height with the least predicted step, over the same work without a bubble, wins, against the price of
waiting.

Example: a pipeline of 4, waiting works 9 and 8, 12 of other work. Releasing nothing costs 3 * 1 / 12 (12
micro-batches of 1) = 0.25 of the work; 8 alone costs 3 * 8 / 20 = 1.2; 9 and 8 together cost 3 * 9 / 29 = 0.93.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from wlb_megatron.packing.varlen.outlier_queues import Item, OutlierQueues
from wlb_megatron.packing.varlen.release import FULL, HELD_SHORT, SCALE, THIN, URGENCY, Situation
from wlb_megatron.pipeline.step_law import StepLaw

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
    due: Sequence[int],
    lot: PackedWork,
    now: Situation,
    law: StepLaw,
    counts: Sequence[int],
    dp: int,
) -> list[int]:
    """How many of each level train now, oldest first; at least `due` of each.

    lot: the due documents and everything else that trains in any case. counts: numbers of micro-batches that a rank
    may get. dp: data-parallel ranks.
    """

    # Outliers may take the place of short documents, which then wait for the next iteration.
    most = min(now.most_tokens + now.short_tokens, now.global_tokens * MOST // 100)

    def value(height: int) -> tuple[int, list[int]]:
        released, after, gain = list(due), lot, 0
        for level in reversed(range(len(released))):
            for item in islice(queues.levels[level], released[level], None):
                if item.work > height or after.tokens + item.tokens > most:
                    break
                released[level] += 1
                after = after.with_item(item)
                age = now.iteration - item.entry
                gain += item.work * (
                    RISE * now.price + URGENCY * age * age // (now.max_delay * now.max_delay or 1)
                )
        over = min(max(0, after.tokens - now.most_tokens), now.short_tokens)
        waits = now.short_work * over // max(now.short_tokens, 1)
        gain -= waits * HELD_SHORT
        after = after._replace(work=after.work - waits, tokens=after.tokens - over)
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
    beside = min(law.estimate(count, share, lot.largest) for count in counts) - share
    missing = max(0, now.global_tokens * FULL // 100 - lot.tokens)
    thin = missing * missing * THIN // (now.global_tokens * now.global_tokens)
    return beside * SCALE // max(share, 1) + thin
