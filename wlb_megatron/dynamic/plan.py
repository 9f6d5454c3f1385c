"""An iteration's plan: in each micro-step, which ranks work together on which documents. All integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.plan import IterationPlan

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks [start, start + size) of the stage, and the documents (indices, ascending) that they train together."""

    start: int
    size: int
    documents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Groups of each micro-step, by first rank. A rank in none of them runs padding in that micro-step."""

    ranks: int
    micro_steps: tuple[tuple[Group, ...], ...]

    def of_rank(self, rank: int) -> list[Group]:
        """Of every micro-step the rank's group; one of the rank alone, without documents, where it has none."""
        groups_of_rank = []
        for groups in self.micro_steps:
            own_groups = [group for group in groups if group.start <= rank < group.start + group.size]
            groups_of_rank.append(own_groups[0] if own_groups else Group(rank, 1, ()))
        return groups_of_rank

    def encode(self) -> IntArray:
        """int64[n]: ranks, micro-steps, then of each group micro-step, start, size, documents and their count."""
        rows = [self.ranks, len(self.micro_steps)]
        for number, groups in enumerate(self.micro_steps):
            for group in groups:
                rows += [number, group.start, group.size, len(group.documents), *group.documents]
        return np.array(rows, dtype=np.int64)

    @staticmethod
    def decode(rows: npt.ArrayLike) -> StepPlan:
        """The plan that `encode` wrote."""
        ranks, steps, *groups = np.asarray(rows, dtype=np.int64).tolist()
        micro_steps: list[list[Group]] = [[] for _ in range(steps)]
        offset = 0
        while offset < len(groups):
            step, start, size, count = groups[offset : offset + 4]
            micro_steps[step].append(Group(start, size, tuple(groups[offset + 4 : offset + 4 + count])))
            offset += 4 + count
        return StepPlan(ranks, tuple(map(tuple, micro_steps)))


def fixed_groups(plan: IterationPlan, context: int) -> StepPlan:
    """An iteration with Megatron's groups: micro-batch m of data-parallel rank d on ranks d * context and on.

    Documents are numbered in the order of the grid, row by row.
    """
    rows, document = [], 0
    for row in plan.micro_batches:
        groups = []
        for rank, micro_batch in enumerate(row):
            groups.append(
                Group(rank * context, context, tuple(range(document, document + len(micro_batch.pieces))))
            )
            document += len(micro_batch.pieces)
        rows.append(tuple(groups))
    return StepPlan(len(plan.micro_batches[0]) * context, tuple(rows))


def in_multiples(plan: StepPlan, tokens: Sequence[int], multiple: int) -> StepPlan:
    """The plan with as many micro-steps as the interleaved schedule takes, a multiple of this.

    The micro-step of most tokens in groups of several documents is split, each such group in two of like tokens on the
    same ranks, until the number is right; where no group has two, all ranks run padding once more. `tokens` has each
    document's. Documents 9 5 4 on ranks 0-1 become two micro-steps, of 9 and of 5 4.
    """
    steps = list(plan.micro_steps)
    while len(steps) % multiple:
        shared = [sum(tokens[d] for g in step if len(g.documents) > 1 for d in g.documents) for step in steps]
        fullest = max(range(len(steps)), key=lambda m: (shared[m], -m), default=0)
        if not steps or not shared[fullest]:
            steps.append(())
            continue
        halves: tuple[list[Group], list[Group]] = ([], [])
        for group in steps[fullest]:
            half_documents: tuple[list[int], list[int]] = ([], [])
            filled = [0, 0]
            for document in sorted(group.documents, key=lambda d: (-tokens[d], d)):
                emptier = int(filled[1] < filled[0])
                half_documents[emptier].append(document)
                filled[emptier] += tokens[document]
            for half, documents in zip(halves, half_documents, strict=True):
                if documents:
                    half.append(Group(group.start, group.size, tuple(sorted(documents))))
        steps[fullest : fullest + 1] = map(tuple, halves)
    return StepPlan(plan.ranks, tuple(steps))


def finish_times(plan: StepPlan, times: Sequence[Sequence[int]], step_ns: int = 0) -> IntArray:
    """int64[ranks]: when each rank is done, if a group starts once all of its ranks are free.

    Group g of micro-step m takes times[m][g] nanoseconds, a rank's padding without a group `step_ns`.
    """
    free_at = np.zeros(plan.ranks, dtype=np.int64)
    for groups, group_times in zip(plan.micro_steps, times, strict=True):
        is_busy = np.zeros(plan.ranks, dtype=bool)
        for group, ns in zip(groups, group_times, strict=True):
            group_ranks = slice(group.start, group.start + group.size)
            free_at[group_ranks] = free_at[group_ranks].max() + ns
            is_busy[group_ranks] = True
        free_at[~is_busy] += step_ns
    return free_at


def validate(plan: StepPlan, lengths: npt.ArrayLike, stage: Stage) -> None:
    """Raise ValueError unless every document is in one group, groups are blocks of the stage that do not overlap
    in a micro-step, and none holds more tokens than fit it."""
    tokens = np.asarray(lengths, dtype=np.int64)
    if plan.ranks != stage.ranks:
        raise ValueError(f"a plan for {plan.ranks} ranks on a stage of {stage.ranks}")
    placed = [d for groups in plan.micro_steps for group in groups for d in group.documents]
    if sorted(placed) != list(range(len(tokens))):
        raise ValueError(f"{len(placed)} documents are placed, not each of {len(tokens)} once")
    limit = dict(zip(stage.sizes, stage.tokens, strict=True))
    for number, groups in enumerate(plan.micro_steps):
        end = 0
        for group in groups:
            if group.size not in limit or group.start % group.size or group.start + group.size > plan.ranks:
                raise ValueError(
                    f"micro-step {number}: ranks {group.start} + {group.size} are no block of the stage"
                )
            if group.start < end:
                raise ValueError(f"micro-step {number}: rank {group.start} is in two groups")
            end = group.start + group.size
            group_tokens = int(tokens[list(group.documents)].sum())
            if group_tokens > limit[group.size]:
                raise ValueError(
                    f"micro-step {number}: {group_tokens} tokens on {group.size} ranks, which hold {limit[group.size]}"
                )
