"""An iteration's plan: in each micro-step, which ranks work together on which documents, in integers. And its costs.

The groups that may be formed over the DP x CP ranks of a pipeline stage are aligned blocks, nested in each other. Their
sizes are a chain in which each divides the next, so two blocks are either apart or one holds the other. A rank is in
one block of each size, of which there are at most MOST_GROUPS of more than one rank. And micro-steps that run in
falling order of their group's size never wait: all ranks of a block have run the same larger blocks before it (see
place_greedily).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.plan import IterationPlan
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.kernel_table import KernelTable

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MOST_GROUPS = 8
"""Process groups of a rank, with Megatron's context-parallel group and that of all ranks, which are there anyway."""

STEP_NS = 300_000
"""Assumed: what a layer takes, forward + backward, for a handful of tokens (launches, small kernels)."""


def block_sizes(context: int, data: int) -> tuple[int, ...]:
    """Sizes of blocks, ascending, from 1 over the context-parallel size to all context x data ranks.

    context 2, data 3: (1, 2, 6). context 4, data 2: (1, 2, 4, 8). context 3, data 2: (1, 3, 6). Where there would be
    more than MOST_GROUPS above 1, the largest are left out, which hold no more tokens than the context-parallel ones;
    context 8, data 512: 1 2 4 8 16 32 64 128 4096.
    """
    sizes = [1]
    for factor in (*_primes(context), *_primes(data)):
        sizes.append(sizes[-1] * factor)
    kept_sizes = {1, context, sizes[-1]}
    other_sizes = [size for size in sizes if size not in kept_sizes]
    return tuple(sorted({*kept_sizes, *other_sizes[: MOST_GROUPS + 1 - len(kept_sizes)]}))


@dataclass(frozen=True, slots=True)
class Stage:
    """The ranks of a pipeline stage as blocks, and what fits a group of each size.

    Blocks have these `sizes`, ascending, the last is all ranks. `tokens` has for each size the most of one micro-step.
    """

    sizes: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return self.sizes[-1]

    def divided(self, parts: int) -> Stage:
        """The same with micro-steps of so many times fewer tokens; all ranks together keep theirs, so that every
        document fits somewhere."""
        return Stage(self.sizes, (*(max(n // parts, 1) for n in self.tokens[:-1]), self.tokens[-1]))

    @staticmethod
    def of(context: int, data: int, max_tokens: int) -> Stage:
        """max_tokens: tokens of a micro-batch of `context` ranks, Lmax. A rank holds at most longest // context of
        them, and no group's micro-step more than Lmax, so that no rank holds more keys than with fixed groups.

        context 2, data 2, Lmax 96: 48, 96, 96 tokens on groups of 1, 2, 4.
        """
        sizes = block_sizes(context, data)
        return Stage(sizes, tuple(min(size * (max_tokens // context), max_tokens) for size in sizes))


def _primes(number: int) -> list[int]:
    """Prime factors, ascending: 12 gives [2, 2, 3]."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


class Group(NamedTuple):
    """Ranks [start, start + size) of the stage, and the documents (indices, ascending) that they train together."""

    start: int
    size: int
    documents: tuple[int, ...]


class StepPlan(NamedTuple):
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

    @staticmethod
    def of_json(ranks: int, micro_steps: list[list[Any]]) -> StepPlan:
        """The plan of the two lists that JSON makes of it."""
        steps = (
            (Group(start, size, tuple(documents)) for start, size, documents in step) for step in micro_steps
        )
        return StepPlan(ranks, tuple(map(tuple, steps)))


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


def finish_times(plan: StepPlan, times: Sequence[Sequence[int]], step_ns: int = STEP_NS) -> IntArray:
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


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """Prices of one layer, forward + backward, on the ranks of a group: what the planner adds up (nanoseconds).

    attention / g + the rest / g + keys exchanged, by degree and by what links the ranks (NVLink inside a node, network
    outside) + what a micro-step costs whatever it holds. predicted_time (plan_step.py) shards whole micro-steps as the
    executor would and is dearer.

    Groups have these `sizes`, ascending. `tables` has the kernel table of each, its exchange over what links such a
    group. `token_ns` is everything of a token but attention; any micro-step costs STEP_NS. `sharding` is how a group
    cuts its documents.
    """

    sizes: tuple[int, ...]
    tables: tuple[KernelTable, ...]
    token_ns: float
    sharding: str = "adaptive"

    def prices(self, lengths: npt.ArrayLike) -> IntArray:
        """int64[sizes, n]: nanoseconds that each document (tokens) costs each rank of a group of each size."""
        shares = np.asarray(lengths, dtype=np.int64) / np.array(self.sizes)[:, None]
        return np.rint(self.attention(lengths) + self.token_ns * shares).astype(np.int64)

    def attention(self, lengths: npt.ArrayLike) -> FloatArray:
        """float64[sizes, n]: the part of `prices` that is attention and its exchange.

        A document is cut in causal pairs over all of its group; one on a group of 1 is whole.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        whole_ns = self.tables[0].diagonal_ns(tokens)
        rows = []
        for size, table in zip(self.sizes, self.tables, strict=True):
            if size == 1:
                attention = whole_ns.astype(np.float64)
            else:
                attention = table.cut_ns(whole_ns, tokens, size)
                # Diagonals run while keys travel: 2 of the 2 x g chunks, each 1 / (2g)^2 of the pairs.
                moved = table.exchange_row * tokens * (size - 1) / size
                attention += np.maximum(moved - whole_ns / (2 * size * size), 0.0)
            rows.append(attention)
        return np.array(rows)

    def opening(self) -> tuple[int, ...]:
        """Nanoseconds that a micro-step on a group of each size costs beyond STEP_NS: latency, one more call."""
        return tuple(
            round(table.exchange + table.earlier_call) if size > 1 else 0
            for size, table in zip(self.sizes, self.tables, strict=True)
        )


def token_ns(table: KernelTable, quadratic_at: float) -> float:
    """Nanoseconds of a layer's token without attention: a document of `quadratic_at` tokens takes as long in attention
    as in the rest. `table` is that of one tensor-parallel rank's heads."""
    probe = np.array([65536], dtype=np.int64)
    plain = replace(table, segment=0.0, query_row=0.0, key_row=0.0)
    return float(plain.diagonal_ns(probe)[0]) / 65536**2 * quadratic_at


def group_cost(
    table: KernelTable,
    token_ns: float,
    sizes: Sequence[int],
    *,
    tensor: int = 1,
    assumptions: Assumptions | None = None,
    sharding: str = "adaptive",
) -> GroupCost:
    """Costs over an assumed cluster. `table` is that of one tensor-parallel rank's heads, its exchange over NVLink.

    tensor: tensor-parallel size, which is how far apart the ranks of a group lie.
    """
    rates = assumptions or Assumptions()
    tables = tuple(rates.linked(table, size, tensor) for size in sizes)
    return GroupCost(sizes=tuple(sizes), tables=tables, token_ns=token_ns, sharding=sharding)
