"""Steps in groups of micro-batches, backwards last first, train what Megatron's own order trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from megatron_combinations import CP, FOUR, OVERLAPS, PP, RECOMPUTE, TP
from megatron_runs import MACHINE, MODEL, TRAINING, mean_losses, train, whole_gradients

from wlb_megatron.pipeline.orders import grouped_orders

pytestmark = pytest.mark.megatron

LAYOUTS = {
    "PP4, full recompute": (4, f"{PP} 4 {RECOMPUTE} uniform", "1,3,2"),
    "PP2xCP2, selective recompute": (4, f"{PP} 2 {CP} 2 --recompute-granularity selective", "6"),
    "TP2xPP2, sequence parallel": (4, f"{TP} 2 {PP} 2 --sequence-parallel", "4,2"),
    "DP2xPP2, distributed optimizer, overlaps": (4, f"{PP} 2 {OVERLAPS}", "1,2;3"),
    "DP2, distributed optimizer, overlaps": (2, OVERLAPS, "1,2;2,1"),
    "one stage": (1, "", "2,1,3"),
}
ITERATIONS = 3


def run(out: Path, corpus: Path, processes: int, extra: str, **environment: str) -> list[dict[str, Any]]:
    base = [flag for part in (MODEL, MACHINE, TRAINING, FOUR, extra) for flag in part.split()]
    base += ["--data-path", str(corpus), "--global-batch-size", "6", "--train-iters", str(ITERATIONS)]
    return train(base, processes, out, **environment)


@pytest.fixture(scope="module")
def single(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("single"), corpus, 1, "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_in_groups_equals_the_single_process_and_is_traced_as_it_ran(
    layout: str, corpus: Path, single: list[dict[str, Any]], tmp_path: Path
) -> None:
    processes, extra, sizes = LAYOUTS[layout]
    traced = tmp_path / "trace.json"
    extra += f" --wlb-trace {traced} --wlb-trace-iteration 2"
    ranks = run(tmp_path / "out", corpus, processes, extra, WORKER_GROUPS=sizes)
    assert mean_losses(ranks, ITERATIONS) == pytest.approx(mean_losses(single, ITERATIONS), rel=1e-6)
    expected, gradients = whole_gradients(single), whole_gradients(ranks)
    assert expected.keys() == gradients.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    events = [event for event in json.loads(traced.read_text())["traceEvents"] if event["ph"] == "X"]
    for data, text in enumerate(sizes.split(";")):
        first, *others = map(int, text.split(","))  # of the first iteration
        orders = grouped_orders(max(rank["place"]["pp"] for rank in ranks) + 1, [*others, first])
        mine = [event for event in events if event["pid"] == data]
        rows = sorted({event["tid"] for event in mine})  # stage by stage, the ranks of each
        for at, row in enumerate(rows):
            ran = sorted((event["ts"], event["name"]) for event in mine if event["tid"] == row)
            order = orders[at * len(orders) // len(rows)]
            assert [name for _, name in ran] == [
                "FB"[step.backward] + str(step.micro_batch) for step in order
            ]
