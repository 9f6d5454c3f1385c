"""Dynamic groups across real processes: attention in mixed groups, and one rank's plans reaching all others."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attention_oracle import SCALE, one_document_at_a_time, padded, random_tensors
from forked_ranks import spawn
from megatron_runs import free_port
from packing_oracle import make_planner
from plan_checks import validate_groups
from random_groups import random_plan

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.sharded_attention import sharded_attention
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.dynamic.plan import Stage, group_cost
from wlb_megatron.dynamic.plan_step import Outcome, plan_step
from wlb_megatron.packing.planner import Planner
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import shard
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.kernel_table import KernelTable, h100

WORLD = 6
STAGE = Stage.of(2, 3, 64)
LENGTHS = [1, 37, 2, 15, 60, 3, 3, 9, 22, 41, 5, 8]


def both(rank: int, port: int) -> None:
    """One start of six processes for both tests: that is what takes the time."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    attend_in_groups(rank, WORLD)
    agree_on_plans(rank, WORLD)
    dist.destroy_process_group()


def attend_in_groups(rank: int, world: int) -> None:
    """Random plans, micro-step by micro-step: each group's documents as if computed one at a time, in fp64."""
    from megatron.core import parallel_state

    from wlb_megatron.plugin.job_state import part
    from wlb_megatron.plugin.micro_batches import loaded
    from wlb_megatron.plugin.micro_batches.loaded import make_groups, process_group
    from wlb_megatron.plugin.micro_batches.planning import RankGroup

    alone = [dist.new_group([member]) for member in range(world)][rank]
    # As with data parallelism 6: all blocks but that of all ranks are made.
    parallel_state.get_data_parallel_group = lambda with_context_parallel: dist.group.WORLD
    parallel_state.get_context_parallel_group = lambda: alone
    make_groups(timedelta(minutes=77))
    made = [group for group in part(loaded.RankGroups).by_size.values() if group is not dist.group.WORLD]
    assert made  # their collectives wait as long as the flag says, not torch's own ten minutes on GPUs
    for group in made:
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=77)
    mixed = set()
    for seed in range(3):
        plan = random_plan(LENGTHS, STAGE, seed)
        validate_groups(plan, LENGTHS, STAGE)
        for step, group in enumerate(plan.of_rank(rank)):
            lengths = padded([LENGTHS[d] for d in group.documents] or [1], group.size)
            x = random_tensors(int(lengths.sum()), seed=100 * seed + step)
            expected = one_document_at_a_time(lengths, x)
            cut = shard(lengths, group.size, "hybrid")
            own = rank - group.start
            index = torch.from_numpy(cut.packed_index(own))
            q, k, v = (t[index].requires_grad_() for t in (x.q, x.k, x.v))
            layout = device_layout(attention_layout(cut, own), "cpu")
            ranks = process_group(RankGroup(group.start, group.size, "", 1.0))
            out = sharded_attention(q, k, v, layout, ranks, TorchKernels(), SCALE)
            got = out, *torch.autograd.grad(out, (q, k, v), x.dout[index])
            for a, b in zip(got, expected, strict=True):
                assert (a - b[index]).norm() <= 1e-12 * b.norm(), (seed, step, group)
            mixed.add(group.size)
    assert len(mixed) > 1


def small_planner() -> Planner:
    lengths = np.random.default_rng(0).integers(1, 16_000, 500)
    stream = DocumentStream.of_lengths(lengths, Rules(16_000, "split", 1, endless=True), name="lengths")
    job = {"window": 16_000, "micro_batches": 1, "dp": WORLD, "micro_batches_per_window": "auto"}
    return make_planner(stream, cost=CostModel(20_000.0), **job)


def agree_on_plans(rank: int, world: int) -> None:
    """Four iterations, then the sender closes: same digests everywhere, documents and state of fixed groups."""
    from wlb_megatron.plugin.micro_batches.planning import ShardSettings, plan_iterations
    from wlb_megatron.plugin.plans.dynamic import DynamicSettings, GroupPlanner, plan_groups
    from wlb_megatron.plugin.stores import PlanStore

    asked = itertools.count()
    shards = ShardSettings(dp_rank=rank, cp_size=1, alignment=1, sharding="adaptive", table=h100())
    stage = Stage.of(1, world, 24_000)
    cost = group_cost(h100(), 300.0, stage.sizes)
    dynamic = DynamicSettings(
        cost=cost,
        plan=GroupPlanner(partial(plan_step, stage=stage, cost=cost)).plan,
        stage_rank=rank,
        closing=lambda: rank == 0 and next(asked) >= 4,
        store=PlanStore(),
    )
    planned = list(plan_groups(small_planner(), shards, dynamic))
    assert len(planned) == 4  # on every rank, though only the sender was told to close
    fixed = itertools.islice(plan_iterations(small_planner(), shards), 4)
    for mine, theirs in zip(planned, fixed, strict=True):
        assert mine.state() == theirs.state() and mine.plan == theirs.plan
        assert mine.micro_batches[0].steps == len(mine.micro_batches)
        in_groups = [micro_batch for micro_batch in mine.micro_batches if micro_batch.group]
        assert all(micro_batch.shard.cp_size == micro_batch.group.size for micro_batch in in_groups)
        digests: list[bytes | None] = [None] * world
        dist.all_gather_object(digests, mine.digest)
        assert len(set(digests)) == 1
        held: list[list[tuple[int, ...]] | None] = [None] * world
        first = [micro_batch for micro_batch in in_groups if micro_batch.group.start == rank]
        pieces = [tuple(piece) for one in first for piece in one.pieces if piece.document >= 0]
        dist.all_gather_object(held, pieces)
        grid = theirs.plan.micro_batches if theirs.plan else ()
        planned = [tuple(piece) for row in grid for micro_batch in row for piece in micro_batch.pieces]
        assert sorted(piece for part in held for piece in part) == sorted(planned)


def test_six_processes_attend_in_mixed_groups_as_one_document_at_a_time_and_train_by_one_s_plans() -> None:
    spawn(both, (free_port(),), WORLD)


def test_ranks_whose_kernel_tables_differ_have_other_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would cut one micro-batch differently, and wait for keys that the others do not send."""
    from wlb_megatron.plugin.micro_batches.planning import ShardSettings
    from wlb_megatron.plugin.plans import dynamic as module

    monkeypatch.setattr(module, "agree", lambda number, tokens, fixed, dynamic: (fixed, "fixed", 1.0))
    shards = ShardSettings(dp_rank=0, cp_size=1, alignment=1, sharding="adaptive", table=h100())
    stage = Stage.of(1, WORLD, 24_000)

    def digest(table: KernelTable) -> bytes:
        cost = group_cost(table, 300.0, stage.sizes)
        # Neither plan nor store is asked: agree is replaced.
        dynamic: Any = module.DynamicSettings(cost, pytest.fail, 0, lambda: False, None)
        return next(module.plan_groups(small_planner(), shards, dynamic)).digest

    assert digest(h100()) == digest(h100()) != digest(replace(h100(), call=h100().call + 1))


def test_rank_0_s_failure_to_plan_reaches_the_others_who_would_wait_for_it(monkeypatch):
    """They draw the next step's micro-batches in the middle of one, in whose collectives rank 0 waits for them."""
    from wlb_megatron.plugin.plans import dynamic as module
    from wlb_megatron.plugin.stores import PlanStore

    def fails(*_: object) -> Outcome:
        raise MemoryError("no plan")

    notes = PlanStore.__new__(PlanStore)
    notes._store = dist.HashStore()
    cost = group_cost(h100(), 300.0, STAGE.sizes)
    settings = module.DynamicSettings(cost, fails, 0, lambda: False, notes)
    for rank, error, says in ((0, MemoryError, "no plan"), (1, RuntimeError, "rank 0 could not make a plan")):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with pytest.raises(error, match=says):
            module.agree(7, [], None, settings)  # type: ignore[arg-type]


def test_a_group_s_documents_are_counted_once_for_the_flops() -> None:
    """Megatron sums over all ranks and divides by the context-parallel size, 2: one of a group's 4 reports twice."""
    from wlb_megatron.plan import Piece, PlanSummary
    from wlb_megatron.plugin.micro_batches.loaded import Layout, from_plan
    from wlb_megatron.plugin.micro_batches.planning import PlannedMicroBatch, RankGroup

    summary = PlanSummary(0, 0, 0, 0, 1.0, 1.0, 1.0, 1, 0, 0.0, 0, 0)
    pieces = (Piece(0, 0, 0, 5), Piece(0, 1, 0, 9), Piece(0, -1, 0, 2))
    group, plan = RankGroup(0, 4, "greedy", 1.0), shard([5, 9, 2], 4, "per-document")
    planned = PlannedMicroBatch(0, 0, pieces, plan, summary, 0.0, group)
    layouts = [Layout(0, 1, 8, True, stage_rank=rank, cp_size=2) for rank in range(4)]
    lengths = [from_plan(planned, layout).document_lengths().tolist() for layout in layouts]
    assert lengths == [[5, 9, 5, 9], [], [], []]
