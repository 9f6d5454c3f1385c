"""Predicts a training step from the work of its micro-batches: the packer's objective.

A micro-batch occupies a stage for the work of its documents plus its own fixed cost (kernel calls, fixed kernels of a
layer), but at least for the time in which the host launches it, forward and backward together. The step is 1F1B over
these times. The simulator runs the same events with times instead of work (schedule.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from wlb_megatron.pipeline.orders import running_order

PAYS = 95
"""Another number of micro-batches must take at most this percentage of the time of one per window. Packing for a free
number gives up equal works within an iteration, which costs a few percent if the final number is the same."""

EXACT = 4
"""With many data-parallel ranks, only this many of the costliest ones are simulated by events."""


@dataclass(frozen=True, slots=True)
class StageRoom:
    """What a pipeline stage can keep of a step, by the memory model, in bytes and layers.

    Args:
        available: Bytes for activations.
        floor: Bytes of each token held, if as many layers are recomputed as the flags say.
        more: Further bytes of each token if none is.
        working: Bytes of each token of the micro-batch at work.
        keys: Bytes of each token of micro-batches that share a document in chunks.
    """

    available: int
    floor: int
    more: int
    working: int = 0
    keys: int = 0

    def kept(self, tokens: int, largest_tokens: int, *, chunked: bool) -> int:
        """Thousandths of the layers recomputed by the flags that a step can keep, if all micro-batches keep the same.

        `tokens` are held at once, and the largest micro-batch has `largest_tokens`. With available 100, floor 2, more
        8, working 1, tokens 15 and largest 10: (100 - 10 - 30) / (8 * 15) = 500 thousandths.
        """
        floor = self.floor + self.keys * chunked
        free_bytes = self.available - largest_tokens * self.working - tokens * floor
        return max(0, min(1000, 1000 * free_bytes // max(1, tokens * self.more)))


@dataclass(frozen=True, slots=True)
class StepLaw:
    """The pipeline of one data-parallel rank, and what a micro-batch costs besides its documents.

    pp: stages. vpp: model chunks per stage. group: an interleaved schedule takes its micro-batches in multiples of
    it. per_micro_batch: work units that each micro-batch adds. least: work units that its forward and its backward
    take at least. per_chunk: work units that a micro-batch of a group adds. backward: how many times as long as a
    forward, (5, 2): 2.5 times. again: thousandths of a forward that the flags repeat in each backward. rooms: room of
    the first and the last stage, if each step keeps as many layers as fit; None: each runs the flags.
    """

    pp: int = 1
    vpp: int = 1
    group: int = 1
    per_micro_batch: int = 0
    least: tuple[int, int] = (0, 0)
    per_chunk: int = 0
    backward: tuple[int, int] = (2, 1)
    again: int = 0
    rooms: tuple[StageRoom, StageRoom] | None = None

    def occupied(self, work: int) -> int:
        """Work units for which a micro-batch of documents of `work` occupies a stage (all its model chunks).

        The host launches ahead and waits for nothing, so only the sum of both ways counts. Example: work 30, least 12
        and 14: 30.
        """
        return max(work + self.per_micro_batch, sum(self.least))

    def kept(self, tokens: Sequence[int], groups: Sequence[int] | None = None) -> int:
        """Thousandths of the layers recomputed by the flags that a step can keep on its first and its last stage.
        tokens: its micro-batches'. 0 where each step runs the flags."""
        if self.rooms is None:
            return 0
        sizes = groups or (1,) * len(tokens)
        return min(
            room.kept(most_held(tokens, sizes, self, stage), max(tokens), chunked=max(sizes) > 1)
            for room, stage in zip(self.rooms, (0, self.pp - 1), strict=True)
        )

    @property
    def held_at_once(self) -> int:
        """The most micro-batches whose activations the first stage holds in Megatron's own order, rounded up to whole
        ones. PP 4 holds 4, with two model chunks 11 halves, so 6."""
        if self.vpp == 1:
            return self.pp
        return -(-(2 * (self.pp - 1) + (self.vpp - 1) * self.pp + 1) // self.vpp)

    def fill(self, longest_work: int) -> int:
        """Work units to fill and drain the pipeline at the pace of a micro-batch that occupies `longest_work`."""
        return (self.pp - 1) * longest_work // self.vpp

    def estimate(self, count: int, work: int, largest_work: int = 0) -> int:
        """Estimated time of `count` equal micro-batches of `work` in all, one of them at least `largest_work`."""
        mean = self.occupied(work // count)
        return count * mean + self.fill(max(self.occupied(largest_work), mean))

    def worthwhile(self, counts: Sequence[int], work: int) -> list[int]:
        """The first of the counts, and those with which evenly spread work takes less time than with the first.

        Returns only the first if the best takes more than PAYS hundredths of its time.
        """
        first, *other_counts = counts
        usual = self.estimate(first, work)
        times = {count: self.estimate(count, work) for count in other_counts}
        if not times or min(times.values()) * 100 > usual * PAYS:
            return [first]
        return [first, *(count for count, time in times.items() if time < usual)]

    def rank(
        self,
        works: Sequence[int],
        groups: tuple[int, ...] | None = None,
        tokens: Sequence[int] | None = None,
    ) -> int:
        """Work units from a rank's first forward to its last backward; works: its micro-batches', in order; groups:
        sizes of those whose backwards run last first (pipeline.orders.grouped_orders), None: all 1. tokens: the
        micro-batches', by which the step keeps layers; None: each backward repeats what the flags say.

        Two stages, micro-batches of 3 and 3: F0 F1 B0 B1 on the first, 1 + 1 + (1 wait) .. in all 9 = (2 + 1) * 3.
        """
        groups = groups or (1,) * len(works)
        if self.per_chunk and max(groups) > 1:
            chunk = [size > 1 for size in groups for _ in range(size)]
            works = [work + self.per_chunk * in_chunk for work, in_chunk in zip(works, chunk, strict=True)]
        occupied = list(map(self.occupied, works))
        backward_share, forward_share = self.backward
        both_shares = backward_share + forward_share
        if tokens is not None and (kept_share := self.kept(tokens, groups)):
            # A backward of the flags, less the forwards that this step does not repeat.
            backward_share, forward_share = (
                1000 * backward_share - forward_share * (self.again * kept_share // 1000),
                1000 * forward_share,
            )
            both_shares *= 1000
        if self.pp == 1:
            return sum(occupied) * (backward_share + forward_share) // both_shares
        none = [0] * (-len(works) % self.group)
        forward, backward = (
            [way * time for time in occupied] + none for way in (forward_share, backward_share)
        )
        groups = (*groups, *(1 for _ in none))
        return step_time(forward, backward, self.pp, groups, chunks=self.vpp) // (both_shares * self.vpp)

    def step(
        self,
        columns: Sequence[Sequence[int]],
        groups: Sequence[tuple[int, ...] | None] | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> int:
        """Work units of a step: the slowest data-parallel rank. columns: works of each rank's micro-batches; groups,
        tokens: each rank's, see `rank`."""
        none: list[None] = [None] * len(columns)
        of_ranks = list(zip(columns, groups or none, tokens or none, strict=True))
        if self.pp > 1 and len(of_ranks) > EXACT:
            rough = [sum(map(self.occupied, works)) + self.fill(max(works)) for works in columns]
            order = sorted(range(len(of_ranks)), key=lambda i: (-rough[i], i))
            of_ranks = [of_ranks[i] for i in order[:EXACT]]
        return max(self.rank(*of_rank) for of_rank in of_ranks)

    def ideal(self, work: int) -> int:
        """Work units of the same documents on one stage, with no layer recomputed where steps keep layers; `work` by
        the flags."""
        if self.rooms is None:
            return work
        backward_share, forward_share = self.backward
        flags = 1000 * (backward_share + forward_share)
        return work * (flags - forward_share * self.again) // flags

    def counts(self, windows: int, per_window: float | None, *, always: bool = False) -> list[int]:
        """Numbers of micro-batches that a rank may be given, ascending; windows: that it trains in a step.

        per_window: how many for each window, None: any of FACTORS, or 1 where there is no pipeline to fill, unless
        `always`. Each is a multiple of the interleaved schedule's group. 3 windows with 1.5 are 5; in groups of 2
        they are 6.
        """
        factors = FACTORS if per_window is None and (always or self.pp > 1) else (per_window or 1,)
        counts = []
        for factor in factors:
            # Fractions: 1.1 * 10 is 11, not 11.000000000000002 rounded up.
            count = -(-Fraction(str(factor)) * windows // 1)
            counts.append(int(-(-count // self.group) * self.group))
        return sorted(set(counts))


def most_held(tokens: Sequence[int], groups: Sequence[int], law: StepLaw, stage: int = 0) -> int:
    """The most tokens that a stage holds at once, from their forward to the end of their backward.

    A token that is held in one of several model chunks counts for its share of the stage. Example: the first of 2
    stages, tokens 5 3 4, groups 2 1: forwards 0 1 2, then backward 1, so at most 12.
    """
    if law.pp == 1:  # one stage runs a group's backwards as soon as all its forwards have run
        ends = list(accumulate(groups))
        return max(sum(tokens[end - size : end]) for end, size in zip(ends, groups, strict=True))
    none = (0,) * (-len(tokens) % law.group)
    tokens, groups = [*tokens, *none], (*groups, *(1 for _ in none))
    plan = running_order(law.pp, groups, law.vpp)
    forwards_ahead, held_now, peak = plan.ahead(law.pp, stage), 0, 0
    for turn, (index, _) in enumerate(plan.table):
        held_now += tokens[index]
        peak = max(peak, held_now)
        if turn >= forwards_ahead:
            held_now -= tokens[plan.turns[plan.table[turn - forwards_ahead][0]]]
    return -(-peak // law.vpp)


FACTORS = (1, 1.5, 2, 3, 4, 6, 8)
"""Micro-batches for each window that are tried. More have paid nowhere: what each costs outweighs the bubble."""


def step_time(
    forward: Sequence[int],
    backward: Sequence[int],
    stages: int,
    group_sizes: tuple[int, ...],
    *,
    chunks: int = 1,
) -> int:
    """Time of one step of equal stages, transfers free: the last end of `pipeline_events`, in exact integers.

    There is no graph, because it takes milliseconds to build and a packer meets new groups in every iteration. Stage s
    begins turn t at time step t + s: forward t of the table, then the backward that follows it there. Whatever a stage
    waits for comes from an earlier time step, or from the next stage in this one. Blocks of an interleaved schedule
    have at least as many micro-batches as there are stages.

    Args:
        forward: Times of each micro-batch in one model chunk of a stage, in any integer unit.
        backward: The same of backwards.
        group_sizes: See `grouped_orders`.
        chunks: How many a stage has; 1 is not interleaved.
    """
    plan = running_order(stages, group_sizes, chunks)
    total, last = len(plan.table), stages - 1
    places = {step: place for place, step in enumerate(plan.table)}
    # In the model chunk before; -1: none.
    before = [places.get((m, chunk - 1), -1) for m, chunk in plan.table]
    forwards = [forward[m] for m, _ in plan.table]
    backwards = [backward[plan.turns[n]] for n, _ in plan.table]
    # Ends of each stage's forwards and backwards by place in the table. At place -1: nothing to wait for.
    activations, gradients = ([[0] * (total + 1) for _ in range(stages)] for _ in range(2))
    ends = [0] * stages
    for time_step in range(total + plan.further * last + plan.lead):
        for stage in reversed(range(stages)):
            end, turn = ends[stage], time_step - stage
            if 0 <= turn < total:
                source = activations[stage - 1][turn if stage else before[turn]]
                end = activations[stage][turn] = (end if end > source else source) + forwards[turn]
            turn -= plan.further * (last - stage) + plan.lead
            if 0 <= turn < total:
                source = gradients[stage + 1][turn] if stage < last else gradients[0][before[turn]]
                end = gradients[stage][turn] = (end if end > source else source) + backwards[turn]
            ends[stage] = end
    return ends[0]
