"""What dynamic groups are compared with: one degree for all documents, and Megatron's own hybrid scheduler's rule."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

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


def megatron_ns(tokens: Sequence[int], stage: Stage, cost: GroupCost, *, packed: bool) -> int:
    """Megatron's own scheduler (BalancedCPScheduler of the installed megatron-core): a document's degree is the least
    power of two that holds it, its cost s * s / degree; a barrier ends each of its rounds. It runs one sequence a
    forward; packed: as if what one group holds in a round were one."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    group: Any = SimpleNamespace(size=lambda: stage.ranks)
    scheduler = BalancedCPScheduler(stage.tokens[0], group)
    _, rounds = scheduler.get_groups_and_subsamples(list(enumerate(tokens)), None)
    total = 0
    for held in rounds:
        # held[r]: documents of rank r. Ranks with the same first document are a group.
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, documents in enumerate(held):
            if documents:
                members.setdefault(tuple(documents), []).append(rank)
        groups, owner = [], []
        for documents, ranks in members.items():
            size = min(level for level in stage.sizes if level >= len(ranks))
            parts = [documents] if packed else [(document,) for document in documents]
            groups += [Group(0, size, part) for part in parts]
            owner += [ranks[0]] * len(parts)
        done = np.zeros(stage.ranks, dtype=np.int64)
        np.add.at(done, owner, fastest(groups, tokens, cost, WITHOUT_HYBRID))
        total += int(done.max())
    return total
