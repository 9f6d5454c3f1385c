"""Steps in groups of micro-batches, backwards last first, train what Megatron's own order trains."""

import json

import pytest
from megatron_combinations import CP, FOUR, OVERLAPS, PP, RECOMPUTE, TP
from megatron_runs import check_alike, flags, train

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
TRAINED = f"{FOUR} --global-batch-size 6 --train-iters {ITERATIONS}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_in_groups_equals_the_single_process_and_is_traced_as_it_ran(layout, corpus, single, tmp_path):
    processes, extra, sizes = LAYOUTS[layout]
    traced = tmp_path / "trace.json"
    reported = f"--wlb-trace {traced} --wlb-trace-iteration 2"
    arguments = flags(f"--data-path {corpus}", TRAINED, extra, reported)
    ranks = train(arguments, processes, tmp_path, WORKER_GROUPS=sizes)
    check_alike(single(TRAINED), ranks, ITERATIONS)
    events = [event for event in json.loads(traced.read_text())["traceEvents"] if event["ph"] == "X"]
    for data, text in enumerate(sizes.split(";")):
        first, *others = map(int, text.split(","))  # of the first iteration
        orders = grouped_orders(max(rank["place"]["pp"] for rank in ranks) + 1, [*others, first])
        mine = [event for event in events if event["pid"] == data]
        rows = sorted({event["tid"] for event in mine})  # stage by stage, the ranks of each
        for at, row in enumerate(rows):
            ran = sorted((event["ts"], event["name"]) for event in mine if event["tid"] == row)
            order = orders[at * len(orders) // len(rows)]
            planned = ["FB"[step.backward] + str(step.micro_batch) for step in order]
            assert [name for _, name in ran] == planned
