"""What an iteration with dynamic groups is predicted to take: every rank of a stage has micro-batches of its own."""

from __future__ import annotations

import pytest
from test_live_view import job_of

from wlb_megatron.dynamic.cost import GroupCost, group_cost, token_ns
from wlb_megatron.dynamic.plan import Group, StepPlan, block_sizes
from wlb_megatron.plugin.logs.prediction import group_predictor, layer_model
from wlb_megatron.sharding.select import shard
from wlb_megatron.simulator.iteration import simulate


def cost_of(context: int, data: int, tensor: int) -> GroupCost:
    table = layer_model(job_of()).table
    return group_cost(table, token_ns(table, 40_000.0), block_sizes(context, data), tensor=tensor)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_groups_of_megatrons_size_are_predicted_as_fixed_ones_are(pipeline: int) -> None:
    job = job_of(pipeline_model_parallel_size=pipeline)
    lengths = [[60_000], [40_000, 20_000], [32_000, 32_000]]
    tokens = [n for row in lengths for _ in range(2) for n in row]
    steps, at = [], 0
    for row in lengths:
        steps.append(
            tuple(
                Group(2 * rank, 2, tuple(range(at + rank * len(row), at + (rank + 1) * len(row))))
                for rank in range(2)
            )
        )
        at += 2 * len(row)
    predicted = group_predictor(job, cost_of(2, 2, 4))(StepPlan(4, tuple(steps)), tokens)
    shards = [[[shard(row, 2, "per-document")] * 2 for row in lengths]]
    assert predicted == pytest.approx(simulate(shards, layer_model(job)).steps[0] / 1e6, rel=0.05)


def test_an_iteration_takes_as_long_as_its_busiest_rank_and_padding_costs_little() -> None:
    predict = group_predictor(job_of(), cost_of(2, 2, 4))
    tokens = [30_000, 30_000]
    apart = predict(StepPlan(4, ((Group(0, 1, (0,)), Group(3, 1, (1,))),)), tokens)
    together = predict(StepPlan(4, ((Group(0, 1, (0, 1)),),)), tokens)
    shared = predict(StepPlan(4, ((Group(0, 4, (0, 1)),),)), tokens)
    padded = predict(StepPlan(4, ((Group(0, 1, (0,)), Group(3, 1, (1,))), ())), tokens)
    assert apart is not None and together is not None and shared is not None and padded is not None
    assert shared < apart < padded < together


def test_a_prediction_that_fails_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    predict = group_predictor(job_of(), cost_of(2, 2, 4))
    assert predict(StepPlan(4, ((Group(0, 3, (0,)),),)), [5]) is None  # no such size
    assert predict(StepPlan(4, ((Group(0, 2, (0,)),),)), [5]) is None
    assert capsys.readouterr().out.count("WARNING") == 1
