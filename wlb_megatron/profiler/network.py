"""Measures collectives and transfers between this job's GPUs, over message sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

WARM_UP, REPEATS = 3, 9
PAUSE_CYCLES = 20_000_000
"""About 10 ms on an H100."""
OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "p2p")


def time_operation(name: str, size: int, device: torch.device) -> dict[str, Any]:
    """(median, p20, p80) nanoseconds of one operation, the slowest rank's. size: bytes that each rank ends up with
    (all_gather, all_to_all), starts from (reduce_scatter) or sends (p2p, one way, between ranks 0 and 1)."""
    run = _operation(name, size, device)
    times = _on_gpu(run) if device.type == "cuda" else _on_cpu(run)
    slowest = torch.tensor(times[WARM_UP:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    quantiles = np.percentile(slowest.cpu().numpy(), (50, 20, 80))
    return {"forward": [int(ns / (2 if name == "p2p" else 1)) for ns in quantiles], "repeats": REPEATS}


def _on_gpu(run: Callable[[], Any]) -> list[float]:
    """One after another behind a pause, so that launching them, which training does ahead, is not in their times."""
    run()  # a communicator is made at its first use
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + REPEATS + 1)]
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(PAUSE_CYCLES)
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e6 for a, b in pairwise(marks)]


def _on_cpu(run: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(WARM_UP + REPEATS):
        dist.barrier()
        begin = time.perf_counter_ns()
        run()
        times.append(float(time.perf_counter_ns() - begin))
    return times


def _operation(name: str, size: int, device: torch.device) -> Callable[[], Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    part = max(size // 2 // world, 1)
    buffer = torch.zeros(part * world, dtype=torch.bfloat16, device=device)
    shard = torch.zeros(part, dtype=torch.bfloat16, device=device)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(buffer, shard)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(shard, buffer)
    if name == "all_to_all":
        output = torch.zeros_like(buffer)
        return lambda: dist.all_to_all_single(output, buffer)
    message = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        elif rank == 1:
            dist.recv(message, 0)
            dist.send(message, 0)

    return there_and_back


def operations(sizes: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    for name in OPERATIONS:
        for size in sizes:
            yield name, size
