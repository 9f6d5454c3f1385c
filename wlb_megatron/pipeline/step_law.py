"""Predicts a training step from the work of its micro-batches: the packer's objective.

A micro-batch occupies a stage for the work of its documents plus its own fixed cost (kernel calls, fixed kernels of a
layer), but at least for the time in which the host launches it, forward and backward together. The step is 1F1B over
these times. The simulator runs the same events with times instead of work (schedule.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from wlb_megatron.pipeline.step_time import step_time

PAYS = 95
"""Another number of micro-batches must take at most this percentage of the time of one per window. Packing for a free
number gives up equal works within an iteration, which costs a few percent if the final number is the same."""

EXACT = 4
"""With many data-parallel ranks, only this many of the costliest ones are simulated by events."""


@dataclass(frozen=True, slots=True)
class StepLaw:
    """The pipeline of one data-parallel rank, and what a micro-batch costs besides its documents.

    pp: stages. vpp: model chunks per stage. group: an interleaved schedule takes its micro-batches in multiples of
    it. per_micro_batch: work units that each micro-batch adds. least: work units that its forward and its backward
    take at least. per_chunk: work units that a micro-batch of a group adds. backward: how many times as long as a
    forward.
    """

    pp: int = 1
    vpp: int = 1
    group: int = 1
    per_micro_batch: int = 0
    least: tuple[int, int] = (0, 0)
    per_chunk: int = 0
    backward: int = 2

    def occupied(self, work: int) -> int:
        """Work units for which a micro-batch of documents of `work` occupies a stage (all its model chunks).

        The host launches ahead and waits for nothing, so only the sum of both ways counts. Example: work 30, least 12
        and 14: 30.
        """
        return max(work + self.per_micro_batch, sum(self.least))

    def _ways(self, work: int) -> tuple[int, int]:
        """The times of forward and backward of a micro-batch, in units divided by 1 + backward."""
        occupied = self.occupied(work)
        return occupied, self.backward * occupied

    def fill(self, longest: int) -> int:
        """Work units to fill and drain the pipeline at the pace of a micro-batch that occupies `longest`."""
        return (self.pp - 1) * longest // self.vpp

    def estimate(self, count: int, work: int, largest: int = 0) -> int:
        """Estimated time of `count` equal micro-batches of `work` in all, one of them at least `largest`."""
        mean = self.occupied(work // count)
        return count * mean + self.fill(max(self.occupied(largest), mean))

    def worthwhile(self, counts: Sequence[int], work: int) -> list[int]:
        """The first of the counts, and those with which evenly spread work takes less time than with the first.

        Returns only the first if the best takes more than PAYS hundredths of its time.
        """
        first, *others = counts
        usual = self.estimate(first, work)
        times = {count: self.estimate(count, work) for count in others}
        if not times or min(times.values()) * 100 > usual * PAYS:
            return [first]
        return [first, *(count for count, time in times.items() if time < usual)]

    def rank(self, works: Sequence[int], groups: tuple[int, ...] | None = None) -> int:
        """Work units from a rank's first forward to its last backward; works: of its micro-batches, in order; groups:
        sizes of those whose backwards run last first (pipeline.orders.grouped_orders), None: all 1.

        Two stages, micro-batches of 3 and 3: F0 F1 B0 B1 on the first, 1 + 1 + (1 wait) .. in all 9 = (2 + 1) * 3.
        """
        if groups is not None and self.per_chunk and max(groups) > 1:
            chunk = [size > 1 for size in groups for _ in range(size)]
            works = [work + self.per_chunk * in_chunk for work, in_chunk in zip(works, chunk, strict=True)]
        if self.pp == 1:
            return sum(map(self.occupied, works))
        forward, backward = zip(*map(self._ways, works), strict=True)
        none = (0,) * (-len(works) % self.group if self.vpp > 1 else 0)
        ends = step_time((*forward, *none), (*backward, *none), self.pp, groups, chunks=self.vpp)
        return ends // ((1 + self.backward) * self.vpp)

    def step(
        self, columns: Sequence[Sequence[int]], groups: Sequence[tuple[int, ...] | None] | None = None
    ) -> int:
        """Work units of a step: the slowest data-parallel rank. columns: works of each rank's micro-batches; groups: of
        each rank, see `rank`."""
        chosen = list(zip(columns, groups or [None] * len(columns), strict=True))
        if self.pp > 1 and len(chosen) > EXACT:
            rough = [sum(map(self.occupied, works)) + self.fill(max(works)) for works in columns]
            order = sorted(range(len(chosen)), key=lambda i: (-rough[i], i))
            chosen = [chosen[i] for i in order[:EXACT]]
        return max(self.rank(works, together) for works, together in chosen)

    def counts(self, windows: int, per_window: float | None, *, always: bool = False) -> list[int]:
        """Numbers of micro-batches that a rank may be given, ascending; windows: that it trains in a step.

        per_window: how many for each window, None: any of FACTORS, or 1 where there is no pipeline to fill, unless
        `always`. Each is a multiple of the interleaved schedule's group. 3 windows with 1.5 are 5; in groups of 2
        they are 6.
        """
        factors = FACTORS if per_window is None and (always or self.pp > 1) else (per_window or 1,)
        group = self.group if self.vpp > 1 else 1
        counts = []
        for factor in factors:
            # Fractions: 1.1 * 10 is 11, not 11.000000000000002 rounded up.
            count = -(-Fraction(str(factor)) * windows // 1)
            counts.append(int(-(-count // group) * group))
        return sorted(set(counts))


FACTORS = (1, 1.5, 2, 3, 4, 6, 8)
"""Micro-batches for each window that are tried. More have paid nowhere: what each costs outweighs the bubble."""


def one_f_one_b(
    times: Sequence[int], stages: int, chunks: int = 1, groups: tuple[int, ...] | None = None
) -> int:
    """When the last backward of a step ends, in the units of `times` (of a micro-batch on a stage, forward and
    backward), rounded down. Integers: alike on every host. groups: see pipeline.orders.grouped_orders."""
    return step_time(times, [2 * time for time in times], stages, groups, chunks=chunks) // (3 * chunks)
