"""What dynamic groups are compared with, priced: one degree for all documents, and plans of Megatron's schedulers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scripts.bench.dynamic.megatron_schedules import Padded, rounds_of_one
from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.cost import GroupCost
from wlb_megatron.dynamic.plan import Group, StepPlan, finish_times
from wlb_megatron.dynamic.predict import group_times

WITHOUT_HYBRID = ("per-sequence", "per-document")
"""Shardings of others: baselines get the faster one of each micro-step, as WLB-LLM does."""


def static_plan(tokens: Sequence[int], stage: Stage, cost: GroupCost, level: int) -> StepPlan | None:
    """All documents on groups of one size: longest first to the least loaded group, then into as few micro-steps as
    first-fit finds. None where the longest does not fit."""
    size, most = stage.sizes[level], stage.tokens[level]
    if max(tokens) > most:
        return None
    price = cost.prices(tokens)[level].tolist()
    groups = stage.ranks // size
    load, bins = [0] * groups, [[] for _ in range(groups)]  # type: ignore[var-annotated]
    for document in sorted(range(len(tokens)), key=lambda d: (-tokens[d], d)):
        at = min(range(groups), key=lambda g: (load[g], g))
        load[at] += price[document]
        for held in bins[at]:
            if sum(tokens[d] for d in held) + tokens[document] <= most:
                held.append(document)
                break
        else:
            bins[at].append([document])
    return StepPlan(
        stage.ranks,
        tuple(
            tuple(
                Group(at * size, size, tuple(sorted(own[step])))
                for at, own in enumerate(bins)
                if step < len(own)
            )
            for step in range(max(map(len, bins)))
        ),
    )


def fastest(
    groups: Sequence[Group], tokens: Sequence[int], cost: GroupCost, kinds: Sequence[str]
) -> list[int]:
    """Nanoseconds of each group by the faster of these shardings."""
    return np.min([group_times(groups, tokens, cost, kind) for kind in kinds], axis=0).tolist()


def planned_ns(plan: StepPlan, tokens: Sequence[int], cost: GroupCost, kinds: Sequence[str]) -> int:
    """Nanoseconds of a layer until the last rank is done."""
    groups = [group for step in plan.micro_steps for group in step]
    flat = iter(fastest(groups, tokens, cost, kinds))
    return int(
        finish_times(plan, [[next(flat) for _ in step] for step in plan.micro_steps], cost.step_ns).max()
    )


def priced(theirs: Padded, cost: GroupCost) -> int:
    """Nanoseconds of a layer by a plan of Megatron's, padding included."""
    return planned_ns(theirs.plan, theirs.tokens, cost, WITHOUT_HYBRID)


def hybrid_ns(tokens: Sequence[int], stage: Stage, cost: GroupCost) -> int:
    """Nanoseconds of a layer by Megatron's --hybrid-context-parallel.

    A document's degree is the least power of two that holds it, a barrier ends each round, and each document is a
    forward of its own."""
    total = 0
    for held in rounds_of_one(tokens, stage):
        # held[r]: documents of rank r. Ranks with the same first document are a group.
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, documents in enumerate(held):
            if documents:
                members.setdefault(tuple(documents), []).append(rank)
        groups, owner = [], []
        for documents, ranks in members.items():
            size = min(level for level in stage.sizes if level >= len(ranks))
            groups += [Group(0, size, (document,)) for document in documents]
            owner += [ranks[0]] * len(documents)
        done = np.zeros(stage.ranks, dtype=np.int64)
        np.add.at(done, owner, fastest(groups, tokens, cost, WITHOUT_HYBRID))
        total += int(done.max())
    return total
