"""Dynamic groups in training: one rank plans each iteration's groups ahead, all others are sent them.

Which documents train in which iteration stays the packer's decision; the groups decide only who computes what
inside the iteration. So the packing state is that of a run with fixed groups, at any layout.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from wlb_megatron.child import Child
from wlb_megatron.dynamic.plan import GroupCost, Stage, StepPlan, fixed_groups, group_cost, token_ns
from wlb_megatron.dynamic.plan_step import LATE, Outcome, outcomes, plan_step
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plan import IterationPlan, PlanSummary
from wlb_megatron.plugin.logs.prediction import PredictGroups, group_predictor
from wlb_megatron.plugin.micro_batches.loaded import make_groups
from wlb_megatron.plugin.micro_batches.planning import (
    PlanAhead,
    PlannedIteration,
    PlannedMicroBatch,
    RankGroup,
    RankPlan,
    ShardSettings,
    iterations_of,
)
from wlb_megatron.plugin.plans.source import Source
from wlb_megatron.plugin.stores import PlanStore
from wlb_megatron.sharding.cut import cut, pad
from wlb_megatron.workload.assumptions import Assumptions

PATIENCE = 0.05
"""Seconds that training waits for better groups, once it trains; then the fixed ones serve."""


@dataclass(frozen=True)
class DynamicSettings:
    """How dynamic groups are planned and sent.

    cost: group sizes, and the kernel table of each. plan: makes rank 0's plans from tokens and fixed groups;
    rank 0 leaves them in the `store`, until it is `closing`. stage_rank: this process's number among the stage's data x
    context parallel ranks. predict: milliseconds of an iteration from its groups and tokens, on the rank that reports
    them.
    """

    cost: GroupCost
    plan: Callable[[list[int], StepPlan], Outcome]
    stage_rank: int
    closing: Callable[[], bool]
    store: PlanStore
    predict: PredictGroups | None = None


def training_plans(
    source: Source, shards: ShardSettings, plan_ahead: Callable[[], PlanAhead]
) -> Callable[[], Iterator[PlannedIteration]]:
    """Make the process groups (on all ranks at once) and return what makes the plans, to be run in a thread.

    plan_ahead: returns the object that runs the thread. Costs are those of the job's profile, or of the model's shape
    on H100s.
    """
    planner, job, config = source.planner, source.job, source.config
    make_groups(timedelta(minutes=job.timeout))
    stage_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    stage_ranks = dist.get_process_group_ranks(stage_group)
    max_tokens = planner.packer.max_tokens // shards.alignment * shards.alignment
    assert config.quadratic_at is not None
    stage = Stage.of(shards.cp_size, len(stage_ranks) // shards.cp_size, max_tokens)
    cost = group_cost(
        *(shards.table, token_ns(shards.table, config.quadratic_at), stage.sizes),
        tensor=job.sizes.tensor,
        assumptions=Assumptions().with_links(job.costs),
        sharding=shards.sharding,
    )
    group_planner = None
    if dist.get_rank() == 0:
        pipeline, multiple = job.sizes.pipeline, job.sizes.micro_step_multiple
        work = partial(plan_step, stage=stage, cost=cost, pipeline=pipeline, multiple=multiple)
        group_planner = GroupPlanner(work)

    def plan(tokens: list[int], fixed: StepPlan) -> Outcome:
        """Rank 0's groups of an iteration: a plan takes as long as an iteration does. Once it trains, training does not
        wait: it gets the fixed groups."""
        assert group_planner is not None
        plans = plan_ahead()
        return group_planner.plan(
            tokens,
            fixed,
            budget=math.inf if plans.pace is None else plans.pace,
            hurry=lambda: plans.pace is not None and plans.waiting > PATIENCE,
        )

    dynamic = DynamicSettings(
        cost=cost,
        plan=plan,
        stage_rank=stage_ranks.index(dist.get_rank()),
        closing=lambda: plan_ahead().closing,
        store=PlanStore(),
        predict=None if shards.predict is None else group_predictor(job, cost),
    )
    return lambda: plan_groups(planner, shards, dynamic)


class GroupPlanner:
    """Rank 0's planner of dynamic groups, a process. WlbError where it cannot start or does not answer."""

    def __init__(self, plan: Callable[..., Outcome]) -> None:
        """plan: dynamic.plan_step.plan_step with what stays the same in all iterations."""
        self._asked = False  # the child has not answered yet
        try:
            self._child = Child(partial(outcomes, plan))
        except OSError as error:
            raise WlbError(
                f"no process can be started to plan dynamic groups ({error}): see the memory and the limit of "
                "processes of this node, or set --wlb-cp-mode fixed"
            ) from None

    def plan(
        self,
        tokens: list[int],
        fixed: StepPlan,
        budget: float = math.inf,
        hurry: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """See dynamic.plan_step.plan_step. The fixed groups, marked late, if `hurry` says so before the child has
        answered."""
        outcome: Outcome | None = None
        try:
            # Else it is still busy with an earlier iteration, for which it is too late.
            if not self._asked or self._child.receive(hurry) is not None:
                self._child.send({"tokens": tokens, "fixed": fixed, "budget": budget})
                outcome = self._child.receive(hurry)
                self._asked = outcome is None
        except OSError as error:
            self._child.kill()
            raise WlbError(
                f"the process that plans dynamic groups does not answer ({error}): see whether the node ran out of "
                "memory, and start again from the last checkpoint"
            ) from None
        except RuntimeError as error:
            raise RuntimeError(f"wlb_megatron: planning failed\n{error}") from None
        # Nothing is predicted of the groups that are always ready.
        return outcome or Outcome(fixed, LATE, predicted=1, fixed=1)


def plan_groups(
    planner: Planner, shards: ShardSettings, dynamic: DynamicSettings
) -> Iterator[PlannedIteration]:
    """Planned iterations one after another, until the planner's stream ends; every rank has equally many
    micro-batches in each. The packer has decided which documents train."""
    numbers = itertools.count()
    table_of = dict(zip(dynamic.cost.sizes, dynamic.cost.tables, strict=True))

    def cut_groups(plan: IterationPlan, summary: PlanSummary, start: float) -> RankPlan | None:
        # 1. Rank 0 places them on groups, and all ranks hear of it. Of documents with 9, 5 and 30 tokens on 4 ranks one
        # micro-step may be: ranks 0 and 1 train the first two, ranks 2 and 3 the third.
        pieces = [piece for row in plan.micro_batches for micro_batch in row for piece in micro_batch.pieces]
        tokens = [piece.tokens for piece in pieces]
        agreed = agree(next(numbers), tokens, fixed_groups(plan, shards.cp_size), dynamic)
        if agreed is None:
            return None
        steps, source, gain = agreed
        # 2. This rank's group in each micro-step cuts its documents.
        counts = shards.predictions(pieces)
        micro_batches = []
        for index, group in enumerate(steps.of_rank(dynamic.stage_rank)):
            # With the padding that makes the group's tokens divide; a group without documents is all padding.
            alignment = shards.alignment // shards.cp_size * group.size
            padded_pieces = pad(tuple(pieces[document] for document in group.documents), alignment)
            table = table_of[group.size]
            lengths = np.array([piece.tokens for piece in padded_pieces], dtype=np.int64)
            (shard_plan,) = cut([lengths], group.size, shards.sharding, table)
            micro_batches.append(
                PlannedMicroBatch(
                    *(plan.iteration, index, padded_pieces, shard_plan, summary, time.perf_counter() - start),
                    group=RankGroup(group.start, group.size, source, gain),
                    predictions=counts,
                    steps=len(steps.micro_steps),
                )
            )
        predicted_ms = None if dynamic.predict is None else dynamic.predict(steps, tokens)
        return RankPlan(tuple(micro_batches), predicted_ms, json.dumps(steps).encode())

    tables = "".join(f"{size} {table.to_json()}" for size, table in table_of.items())
    return iterations_of(planner, shards, cut_groups, tables)


def agree(
    number: int, tokens: list[int], fixed: StepPlan, dynamic: DynamicSettings
) -> tuple[StepPlan, str, float] | None:
    """Rank 0's plan, whose it is, and its predicted gain over fixed groups; the same on every rank. None when rank 0 or
    this one is closing: no rank is then left waiting.

    number: the plan's number, from 0.
    """
    if dist.get_rank() == 0:
        note = dynamic.store.leave(
            number, lambda: b"" if dynamic.closing() else _encode(dynamic.plan(tokens, fixed))
        )
    else:
        note = dynamic.store.take(number, dynamic.closing) or b""
    if not note:
        return None
    source, predicted_ns, fixed_ns, plan = json.loads(note)
    return StepPlan.of_json(*plan), source, fixed_ns / max(predicted_ns, 1)


def _encode(outcome: Outcome) -> bytes:
    return json.dumps([outcome.source, outcome.predicted, outcome.fixed, outcome.plan]).encode()
