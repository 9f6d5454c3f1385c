"""Pipelines of several chunks a stage, experts and sharded optimizers equal the single process; shapes in their order.

A few rows of the table in megatron_combinations.py; scripts/check_combinations.py runs all of them.
"""

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron_combinations import CPU
from megatron_runs import check_alike, flags, train

from wlb_megatron.plugin import install
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.step import pipeline_shapes
from wlb_megatron.plugin.step.pipeline_shapes import (
    ShapeQueue,
    transfer_orders,
    wrap_send_forward_recv_forward,
)

ROWS = {row.name: row for row in CPU}
RUN = "--global-batch-size 4 --train-iters 2"


@pytest.mark.megatron
@pytest.mark.parametrize(
    "name",
    [
        "VPP2 on PP2, DP2, distributed optimizer",
        "VPP2 on PP4 = micro-batches",  # all in the warm-up: activations wrap from the last stage to the first
        "MTP of 1, MoE, TP2+SP, CP2",
        "torch FSDP2, DP2xCP2",
        "FP8 delayed, full recompute, DP2xPP2",
    ],
)
def test_a_row_of_the_table_equals_the_single_process(name, corpus, single, tmp_path):
    row = ROWS[name]
    ranks = train(flags(f"--data-path {corpus}", RUN, row.model, row.flags), row.processes, tmp_path)
    check_alike(single(RUN, row.model), ranks, 2)


@pytest.mark.parametrize("micro_batches", [4, 6, 8])
@pytest.mark.parametrize(("stages", "chunks", "group"), [(2, 1, 1), (2, 2, 2), (4, 2, 4), (2, 3, 4)])
def test_the_order_is_that_of_megatrons_schedule_table(micro_batches, stages, chunks, group):
    """Every stage runs Megatron's table; walking it as a pipeline gives what passes between neighbours."""
    table = (
        get_schedule_table(micro_batches, chunks, group)
        if chunks > 1
        else [(i, 0) for i in range(micro_batches)]
    )
    forward = defaultdict(deque)
    for stage in range(stages):
        for index, chunk in table:
            if (stage, chunk) != (stages - 1, chunks - 1):
                forward[(stage + 1) % stages].append(index)
    for stage in range(stages):
        orders = transfer_orders(micro_batches, stage, stages, chunks, group)
        following = transfer_orders(micro_batches, (stage + 1) % stages, stages, chunks, group)
        assert orders["send forward"] == following["receive forward"]
        assert orders["receive backward"] == following["send backward"]
        assert orders["receive forward"] == list(forward[stage])


def test_a_tensor_of_another_shape_than_planned_is_an_error_on_the_host():
    """E3: 2 stages of 2 chunks, the last stage sends its first chunk's outputs back to the first stage."""

    class Tensor:
        shape = (24, 1, 8)

    queue = ShapeQueue([(24, 1, 8), (40, 1, 8)], transfer_orders(2, stage=1, stages=2, chunks=2, group=2))
    queue.check("send forward", Tensor())
    with pytest.raises(RuntimeError, match="planned"):
        queue.check("send forward", Tensor())
    with pytest.raises(RuntimeError, match="but the step has 2"):
        queue.check("send forward", Tensor())


class Transfer:
    """A send that reads its tensor when it is waited for, as late as a real one may."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.received = tensor, torch.empty(0)

    def wait(self) -> None:
        self.received = self.tensor.clone()


@pytest.mark.parametrize("frees", [True, False])
def test_before_0_18_an_output_has_been_sent_when_megatron_frees_it(frees, monkeypatch):
    """Megatron's interleaved schedule frees what it sent as soon as the call is back (deallocate_output_tensor)."""
    part(pipeline_shapes.KnownShapes).queue = object()
    output = torch.arange(6.0)
    transfer = Transfer(output)
    communicator = SimpleNamespace(config=SimpleNamespace(deallocate_pipeline_outputs=frees))

    def original(self: Any, output: Any, *, overlap_p2p_comm: bool) -> Any:
        return ("input", {"send_next": transfer, "recv_prev": "later"}) if overlap_p2p_comm else "input"

    send = wrap_send_forward_recv_forward(original)
    assert send(communicator, output, overlap_p2p_comm=False) == "input"
    _, handles = send(communicator, output, overlap_p2p_comm=True)
    assert "recv_prev" in handles
    assert ("send_next" in handles) != frees
    if frees:
        output.data = torch.empty(1)
        assert transfer.received.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("version", "mended"), [("0.16.2", True), ("0.17.2", True), ("0.18.2", False)])
def test_outputs_are_waited_for_where_megatron_does_not(version, mended, monkeypatch):
    monkeypatch.setattr(install, "megatron_version", lambda: version)
    assert any(hook.wrap is wrap_send_forward_recv_forward for hook in install.rows()) == mended
