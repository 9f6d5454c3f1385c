"""One rank of a job of many, alone on its device: its memory is real, what other ranks would send is not.

python -m scripts.bench.training.lone_rank 5/32 REPORT.json <the flags of wlb_megatron.pretrain_gpt>

torch's fake process group takes every collective for done. So tensors, kernels and the order of a step are those of
rank 5 of 32; losses mean nothing. An all-to-all copies its input, a stage receives noise. What NCCL allocates is not
counted. REPORT.json gets the peaks of each step, and what the memory model knows of this rank. With --by-the-flags,
steps recompute what Megatron's flags say.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import Tensor
from torch.distributed import distributed_c10d

from wlb_megatron.packing.limits import GpuMemory

Report = dict[str, Any]


def main() -> None:
    place, path, *flags = sys.argv[1:]
    os.environ["RANK"], os.environ["WORLD_SIZE"] = place.split("/")
    report: Report = {"steps": [], "before": torch.cuda.memory_allocated()}
    by_the_flags = "--by-the-flags" in flags
    flags = [flag for flag in flags if flag != "--by-the-flags"]
    sys.argv = ["pretrain_gpt", *flags, "--fake-process-group"]
    with alone(), reporting(report, by_the_flags=by_the_flags):
        from wlb_megatron.plugin import pretrain_gpt

        with contextlib.suppress(SystemExit):
            pretrain_gpt.main()
    Path(path).write_text(json.dumps(report), encoding="utf-8")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Stand in for RANK of WORLD_SIZE ranks: what waits for the others' words finds them agreed."""
    from megatron.core.tensor_parallel import layers, mappings

    from wlb_megatron.plugin.plans.agreement import PlanAgreement

    replaced: Any = dist
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def fake(*_: Any, **__: Any) -> None:
        distributed_c10d.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)

    def gather_objects(objects: list[Any], mine: Any, *_: Any, **__: Any) -> None:
        objects[:] = [mine] * len(objects)

    stand_ins: list[tuple[Any, str, Any]] = [
        (replaced, "init_process_group", fake),
        (replaced, "all_gather_object", gather_objects),
        (replaced, "broadcast_object_list", _nothing),
        (replaced, "all_to_all_single", _copy_over),
        (replaced, "batch_isend_irecv", _receive_noise),
        (PlanAgreement, "compare", _nothing),
        (replaced, "reduce_scatter_tensor", _take_part),
        (mappings, "dist_reduce_scatter_func", _take_part),
        (layers, "dist_reduce_scatter_func", _take_part),
    ]
    usual = [(place, name, getattr(place, name)) for place, name, _ in stand_ins]
    try:
        for place, name, stand_in in stand_ins:
            setattr(place, name, stand_in)
        yield
    finally:
        for place, name, original in usual:
            setattr(place, name, original)


def _nothing(*_: Any, **__: Any) -> None:
    """Of what the other ranks would have to take part in."""


class _Done:
    """The handle of a collective that has run."""

    def wait(self, *_: Any) -> bool:
        return True


def _copy_over(output: Tensor, input: Tensor, *_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    """An all-to-all in which every rank sends what this one does: rows from the first on, over again where needed."""
    with torch.no_grad():
        rows, sent = output.shape[0], input.shape[0]
        for begin in range(0, rows if sent else 0, max(1, sent)):
            part = output[begin : begin + sent]
            part.copy_(input[: part.shape[0]])
    return _Done() if async_op else None


def _take_part(output: Tensor, input: Tensor, *_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    """A sum over ranks scattered: this rank's rows alone. Left as they were, routers would see one row many times."""
    return _copy_over(output, input[: output.shape[0]], async_op=async_op)


def _receive_noise(operations: list[Any]) -> list[_Done]:
    """What another stage would send is drawn at random, so that routers choose experts as they do in training."""
    with torch.no_grad():
        for operation in operations:
            if operation.op is dist.irecv and operation.tensor.is_floating_point():
                operation.tensor.normal_()
    return [_Done() for _ in operations]


@contextlib.contextmanager
def reporting(report: Report, *, by_the_flags: bool) -> Iterator[None]:
    """Note each step's peaks, and the job as the memory model knows it."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from wlb_megatron.plugin.flags import limits
    from wlb_megatron.plugin.job_state import part
    from wlb_megatron.plugin.logs import trace
    from wlb_megatron.plugin.plans import provider
    from wlb_megatron.plugin.step import recomputation

    dispatcher: Any = MoEAlltoAllTokenDispatcher
    preprocess, routed = dispatcher.preprocess, []

    def counted(self: Any, routing_map: Tensor) -> Any:
        per_expert = routing_map.sum(dim=0).float()
        received = per_expert[list(self.local_expert_indices)].sum() * self.ep_size / per_expert.sum()
        routed.append((per_expert.max() / per_expert.mean(), received))
        return preprocess(self, routing_map)

    usual, recompute_memory = trace.after_iteration, provider.recompute_memory
    plan = recomputation._plan
    loads: list[Report] = []
    began = time.perf_counter()

    def after_iteration(iteration: int, _: Any, __: Any, pieces: Any) -> None:
        nonlocal began
        cuda, recomputed = torch.cuda, part(recomputation.Recomputation)
        cuda.synchronize()
        now = time.perf_counter()
        # Of a layer: tokens of the fullest expert, and of this rank's experts, over the mean.
        imbalance = [max(map(float, ratios)) for ratios in zip(*routed, strict=True)]
        routed.clear()
        report["steps"].append(
            {
                "iteration": iteration,
                "seconds": now - began,
                "allocated": cuda.max_memory_allocated(),
                "reserved": cuda.max_memory_reserved(),
                "between": cuda.memory_allocated(),
                "recomputed": asdict(recomputed.last),
                "scale": recomputed.scale,
                "experts": imbalance,
                "loads": loads[-1:],
                "documents": [[[p.document, p.start, p.end] for p in row] for row in pieces],
            }
        )
        cuda.reset_peak_memory_stats()
        began = now

    def noted(job: Any) -> Any:
        memory = limits.gpu_memory(job, even_with_experts=True)
        if memory is not None:
            report.update(_described(memory))
        return recompute_memory(job)

    def planned(state: Any, batches: Any, decoders: Any) -> Any:
        state.suspended = state.suspended or by_the_flags
        made = plan(state, batches, decoders)
        loads.append(
            {
                "peak": made.peak,
                "by_the_flags": by_the_flags,
                "layers": [decoder.num_layers_per_pipeline_rank for decoder in decoders],
                "loads": [asdict(load) for load in batches[0].loads],
                "groups": batches[0].chunk_groups,
            }
        )
        return made

    try:
        replaced: Any = trace
        replaced.after_iteration, provider.recompute_memory = after_iteration, noted
        recomputation._plan, dispatcher.preprocess = planned, counted
        yield
    finally:
        trace.after_iteration, provider.recompute_memory = usual, recompute_memory
        recomputation._plan, dispatcher.preprocess = plan, preprocess


def _described(memory: GpuMemory) -> Report:
    """What estimates are made of, and this rank's stage."""
    from megatron.core import parallel_state

    return {
        "shape": asdict(memory.shape),
        "layout": asdict(memory.layout),
        "experts": memory.shape.experts and asdict(memory.shape.experts),
        "depths": memory.depths,
        "window": memory.window,
        "alignment": memory.alignment,
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
    }


if __name__ == "__main__":
    main()
