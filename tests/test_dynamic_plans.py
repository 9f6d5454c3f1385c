"""Plans of dynamic groups: valid for any documents, near the best there is, the same every time."""

from __future__ import annotations

import fcntl
import json
import signal
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import validate_groups
from random_groups import random_plan

from scripts.lengths import code_like, paper_like, web_like
from wlb_megatron import child
from wlb_megatron.documents.lengths import pieces_of
from wlb_megatron.dynamic.placement import Problem
from wlb_megatron.dynamic.plan import (
    MOST_GROUPS,
    STEP_NS,
    Group,
    GroupCost,
    Stage,
    StepPlan,
    block_sizes,
    finish_times,
    group_cost,
    in_multiples,
)
from wlb_megatron.dynamic.plan_step import FIXED, LATE, place, plan_step, predicted_time
from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.plans.dynamic import GroupPlanner
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.kernel_table import h100


@st.composite
def stages_and_tokens(draw: st.DrawFn) -> tuple[int, Stage, list[int]]:
    """The context-parallel size, ranks of a stage, and documents of which each fits all of them together."""
    context, data = draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (4, 1), (2, 3), (3, 2), (4, 4), (2, 5)]))
    stage = Stage.of(context, data, max_tokens=9000 // context * context)
    lengths = draw(st.lists(st.integers(1, 9000), min_size=1, max_size=40))
    return context, stage, [min(n, stage.tokens[-1]) for n in lengths]


def cost_of(stage: Stage) -> GroupCost:
    return group_cost(h100(), 300.0, stage.sizes)


def problem(tokens: list[int], stage: Stage) -> Problem:
    cost = cost_of(stage)
    return Problem(stage, list(tokens), cost.prices(tokens).tolist(), cost.opening())


@settings(deadline=None, max_examples=60)
@given(stages_and_tokens())
def test_every_plan_is_valid_and_runs_equally_many_micro_steps_on_every_rank(drawn):
    _, stage, tokens = drawn
    made = plan_step(tokens, stage, cost_of(stage))
    validate_groups(made.plan, tokens, stage)
    for rank in range(stage.ranks):
        groups = made.plan.of_rank(rank)
        assert len(groups) == len(made.plan.micro_steps)
        assert all(group.start <= rank < group.start + group.size for group in groups)
        # From the largest group to the smallest, so that no rank waits; padding last.
        busy = [group.size for group in groups if group.documents]
        assert busy == sorted(busy, reverse=True)
        assert not any(group.documents for group in groups[len(busy) :])
    assert StepPlan.of_json(*json.loads(json.dumps(made.plan))) == made.plan


@settings(deadline=None, max_examples=30)
@given(stages_and_tokens())
def test_fixed_groups_are_kept_unless_others_are_predicted_faster(drawn):
    context, stage, tokens = drawn
    starts = [i * context % stage.ranks for i in range(len(tokens))]
    every = StepPlan(stage.ranks, tuple((Group(at, context, (i,)),) for i, at in enumerate(starts)))
    made = plan_step(tokens, stage, cost_of(stage), fixed=every)
    assert made.predicted <= made.fixed
    assert (made.source == FIXED) == (made.plan == every and made.predicted == made.fixed)
    assert plan_step(tokens, stage, cost_of(stage), fixed=every) == made


def best_by_brute_force(placed: Problem) -> int:
    """The least time over all ways to give each document a block and a micro-step of it."""
    stage, tokens = placed.stage, placed.tokens
    blocks = [(start, size) for size in stage.sizes for start in range(0, stage.ranks, size)]
    best = None
    for chosen in product(blocks, repeat=len(tokens)):
        load, steps = [0] * stage.ranks, [0] * stage.ranks
        for start, size in dict.fromkeys(chosen):
            level = stage.sizes.index(size)
            own = [d for d in range(len(tokens)) if chosen[d] == (start, size)]
            bins = fewest_bins([tokens[d] for d in own], stage.tokens[level])
            if bins is None:
                break
            for rank in range(start, start + size):
                load[rank] += sum(placed.prices[level][d] for d in own) + bins * placed.opening[level]
                steps[rank] += bins
        else:
            time = max(load) + STEP_NS * max(steps)
            best = time if best is None else min(best, time)
    assert best is not None
    return best


def fewest_bins(sizes: list[int], capacity: int) -> int | None:
    if max(sizes) > capacity:
        return None
    return min(
        len(set(where))
        for where in product(range(len(sizes)), repeat=len(sizes))
        if all(sum(s for s, w in zip(sizes, where, strict=True) if w == b) <= capacity for b in set(where))
    )


@pytest.mark.parametrize("seed", range(12))
def test_small_plans_are_within_one_percent_of_the_best_there_is_but_for_one(seed: int) -> None:
    dice = np.random.default_rng(seed)
    shape = [(2, 1), (2, 2), (1, 2), (3, 1)][seed % 4]
    stage = Stage.of(*shape, max_tokens=24_000)
    count = 5 if stage.ranks == 2 else 4
    tokens = np.clip(dice.lognormal(8, 1.2, count), 1, 12_000).astype(int).tolist()
    small = problem(tokens, stage)
    best = best_by_brute_force(small)
    assert small.bound <= best <= place(small).time() <= (1.05 if seed == 6 else 1.01) * best


@pytest.mark.parametrize("kind", [code_like, web_like, paper_like])
def test_large_plans_are_within_four_percent_of_what_no_plan_goes_below(kind: object) -> None:
    stage = Stage.of(16, 2, 16 * 9216)
    lengths = pieces_of(kind(20_000), 16 * 6144, "split")  # type: ignore[operator]
    tokens = np.random.default_rng(3).choice(lengths, 400).tolist()
    large = problem(tokens, stage)
    placement = place(large)
    assert large.bound <= placement.time() <= 1.04 * large.bound
    assert placement.plan() == plan_step(tokens, stage, cost_of(stage)).plan


def test_blocks_are_nested_and_a_rank_is_in_at_most_eight_of_them() -> None:
    for context, data in [*product(range(1, 9), range(1, 9)), (8, 512), (1024, 4), (1, 4096), (6, 360)]:
        sizes = block_sizes(context, data)
        assert context in sizes and sizes[-1] == context * data
        assert all(large % small == 0 for small, large in pairwise(sizes))
        assert len(sizes) <= min(int(np.log2(context * data)), MOST_GROUPS) + 1
        for rank in range(0, context * data, max(1, context * data // 50)):
            own = [
                size
                for size in sizes[1:]
                for start in range(0, sizes[-1], size)
                if start <= rank < start + size
            ]
            assert own == list(sizes[1:])
    assert block_sizes(8, 512) == (1, 2, 4, 8, 16, 32, 64, 128, 4096)
    assert block_sizes(1024, 4) == (1, 2, 4, 8, 16, 32, 64, 1024, 4096)


@pytest.mark.parametrize(("tensor", "inside"), [(1, 8), (4, 2)])
def test_groups_over_nodes_pay_for_the_network_and_those_within_one_do_not(tensor: int, inside: int) -> None:
    sizes = (1, 2, 4, 8, 16, 32)
    near = group_cost(h100(), 300.0, sizes, tensor=tensor, assumptions=Assumptions(node=1024))
    real = group_cost(h100(), 300.0, sizes, tensor=tensor, assumptions=Assumptions(node=8))
    for level, size in enumerate(sizes):
        rows = [cost.tables[level].exchange_row for cost in (near, real)]
        assert (rows[1] > rows[0]) == (size > inside) and rows[1] >= rows[0]
        assert (real.opening()[level] > near.opening()[level]) == (size > inside)
    assert (real.prices([2000, 60_000]) >= near.prices([2000, 60_000])).all()


def test_a_document_stays_within_a_node_where_the_network_is_slow() -> None:
    stage = Stage.of(16, 1, 160_000)
    chosen = []
    for network in (370e9, 1e9):
        cost = group_cost(h100(), 300.0, stage.sizes, assumptions=Assumptions(network_rate=network))
        (step,) = plan_step([60_000], stage, cost).plan.micro_steps
        chosen.append(step[0].size)
    assert chosen == [16, 8]


def test_a_group_starts_when_its_last_rank_is_free_and_a_document_that_fits_none_is_refused_by_name():
    """Ranks 0 1 take 5 together while 2 takes 9 alone; then all three take 1; rank 3 pads 2 and 2."""
    plan = StepPlan(4, ((Group(0, 2, (0,)), Group(2, 1, (1,))), (Group(0, 3, (2,)),)))
    assert finish_times(plan, [[5, 9], [1]], step_ns=2).tolist() == [10, 10, 10, 4]
    stage = Stage.of(2, 2, 100)
    with pytest.raises(ValueError, match="101 tokens exceeds Lmax of 100"):
        plan_step([101], stage, cost_of(stage))


@pytest.mark.parametrize(
    ("micro_steps", "message"),
    [
        (((Group(0, 2, (0,)),),), "1 documents are placed"),
        (((Group(0, 2, (0, 1)),),), "11 tokens on 2 ranks"),
        (((Group(1, 2, (0,)),), (Group(0, 4, (1,)),)), "no block"),
        (((Group(0, 2, (0,)), Group(1, 1, (1,))),), "two groups"),
    ],
)
def test_a_wrong_plan_is_told_apart(micro_steps, message):
    stage = Stage.of(2, 2, 10)
    with pytest.raises(ValueError, match=message):
        validate_groups(StepPlan(4, micro_steps), [6, 5], stage)


PLAN_OF_FOUR = partial(plan_step, stage=Stage.of(2, 2, 8000), cost=cost_of(Stage.of(2, 2, 8000)))
PAIRS = StepPlan(4, ((Group(0, 2, (0,)), Group(2, 2, (1,))),))


def test_the_planning_process_answers_as_the_planner_does_and_a_line_says_that_it_has_died(monkeypatch):
    tokens = np.random.default_rng(1).integers(1, 4000, 30).tolist()
    fixed = StepPlan(4, tuple((Group(at % 2 * 2, 2, (at,)),) for at in range(30)))
    process, expected = GroupPlanner(PLAN_OF_FOUR), PLAN_OF_FOUR(tokens, fixed=fixed)
    assert process.plan(tokens, fixed) == expected
    process._child.kill()
    with pytest.raises(
        WlbError, match=r"dynamic groups does not answer \(it has been killed by signal 9\): see"
    ):
        process.plan(tokens, fixed)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(
        WlbError, match=r"no process can be started to plan dynamic groups \(.*/nowhere/python"
    ):
        GroupPlanner(PLAN_OF_FOUR)


@pytest.mark.parametrize("full", [False, True])
def test_a_planning_process_that_stands_still_is_given_up(full, monkeypatch):
    monkeypatch.setattr(child, "PATIENCE", 0.5)
    process = GroupPlanner(PLAN_OF_FOUR)
    planning = process._child
    planning.process.send_signal(signal.SIGSTOP)
    if full:  # a pipe of one page is full before the settings are told
        fcntl.fcntl(planning._stdin, fcntl.F_SETPIPE_SZ, 4096)
        assert process.plan([5, 9], PAIRS, hurry=lambda: True).source == LATE
    with pytest.raises(WlbError, match=r"no plan in 0\.5 s"):
        process.plan([5, 9], PAIRS)
    assert planning.process.wait(10) == -signal.SIGKILL


def test_training_gets_fixed_groups_where_a_plan_is_late_and_plans_again_when_the_process_does(capsys):
    process = GroupPlanner(PLAN_OF_FOUR)
    assert process.plan([5, 9], PAIRS) == PLAN_OF_FOUR([5, 9], fixed=PAIRS)
    process._child.process.send_signal(signal.SIGSTOP)
    for _ in range(3):
        made = process.plan([5, 9], PAIRS, hurry=lambda: True)
        assert made.source == LATE and made.plan == PAIRS and made.predicted == made.fixed
    process._child.process.send_signal(signal.SIGCONT)
    assert process.plan([4, 8], PAIRS) == PLAN_OF_FOUR([4, 8], fixed=PAIRS)
    assert not capsys.readouterr().out


def test_a_budget_that_is_used_up_leaves_a_valid_plan() -> None:
    stage = Stage.of(8, 4, 96_000)
    tokens = np.random.default_rng(2).integers(1, 20_000, 300).tolist()
    made = plan_step(tokens, stage, cost_of(stage), pipeline=2, budget=0.0)
    validate_groups(made.plan, tokens, stage)
    drawn = problem(tokens, stage)
    assert place(drawn).time() <= place(drawn, deadline=0.0).time()


@settings(deadline=None, max_examples=60)
@given(stages_and_tokens(), st.integers(1, 5), st.integers(0, 9))
def test_micro_steps_come_in_multiples_with_every_document_on_the_ranks_that_it_had(drawn, multiple, seed):
    _, stage, tokens = drawn
    plan = random_plan(tokens, stage, seed)
    made = in_multiples(plan, tokens, multiple)
    validate_groups(made, tokens, stage)
    assert len(made.micro_steps) % multiple == 0 and len(made.micro_steps) < len(plan.micro_steps) + multiple
    places = [
        {d: (g.start, g.size) for step in step_plan.micro_steps for g in step for d in g.documents}
        for step_plan in (plan, made)
    ]
    assert places[0] == places[1]
    groups = [group for step in made.micro_steps for group in step]
    assert all(made.micro_steps) or all(len(group.documents) == 1 for group in groups)


def test_the_micro_step_of_most_tokens_is_split_into_like_halves() -> None:
    plan = StepPlan(2, ((Group(0, 2, (0, 1, 2)),), (Group(0, 1, (3,)),), (Group(1, 1, (4, 5)),)))
    made = in_multiples(plan, [9, 5, 4, 30, 2, 2], 2)
    assert made.micro_steps == ((Group(0, 2, (0,)),), (Group(0, 2, (1, 2)),), *plan.micro_steps[1:])


def test_with_pipeline_stages_micro_steps_are_smaller_where_that_fills_the_pipeline_sooner() -> None:
    stage, cost = Stage.of(4, 2, 96_000), cost_of(Stage.of(4, 2, 96_000))
    tokens = [4000] * 48
    alone = plan_step(tokens, stage, cost)
    piped = plan_step(tokens, stage, cost, pipeline=8)
    validate_groups(piped.plan, tokens, stage)
    assert len(piped.plan.micro_steps) > len(alone.plan.micro_steps)
    assert piped.predicted <= predicted_time(alone.plan, tokens, cost, pipeline=8)
