"""Measures all points of a model's profile.

Times of a forward and a backward are medians and spreads, with the host's share separate.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from wlb_megatron import __version__
from wlb_megatron.attention.kernels import kernel_choice
from wlb_megatron.errors import installed_version
from wlb_megatron.profiler.layer import (
    AttentionBench,
    Ends,
    Part,
    embedding_step,
    keep_gradients,
    layer_step,
    loss_step,
    megatron_layer,
    optimizer_step,
)
from wlb_megatron.profiler.points import GRIDS, Grid, Point, attention_points
from wlb_megatron.registry import KERNELS
from wlb_megatron.workload.fit import LINKS
from wlb_megatron.workload.profile import FORMAT, ProfiledModel, host_name

Say = Callable[[str], None]


def profile(
    model: ProfiledModel, *, grid: str, backend: str, budget: float, tick: Say, say: Say
) -> dict[str, Any]:
    """The measurements, JSON-able: `settings`, `samples` and more. Only rank 0's are complete.

    budget: seconds after which no further point begins. tick: called with each point. say: called with messages.
    """
    begin = time.perf_counter()
    device = torch.device("cpu") if backend == "torch" else torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(1)
    settings = _settings(model, grid, backend, device)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    parts = _Parts(model, GRIDS[grid], backend, device)
    samples: list[dict[str, Any]] = []
    left_out = 0
    for point in _points(GRIDS[grid], model) if rank == 0 else ():
        tick(_name(point))
        if time.perf_counter() - begin > budget:
            left_out += 1
            continue
        try:
            waits = point.part == "layer" and model.experts is not None  # for its routes
            timing = parts.clock.measure(*parts.step(point), waits=waits)
        except RuntimeError as error:  # out of memory, or a shape that the kernels do not take
            what = f"{point.part} {point.sizes}"[:100]
            say(f"{what} is left out: {str(error).splitlines()[0][:200]}")
            torch.cuda.empty_cache()
            continue
        samples.append({"part": point.part, "sizes": point.sizes, **asdict(timing)})
    if world > 1:
        for name, size in product(LINKS, GRIDS[grid].bytes):
            tick(f"{name} {size} bytes")
            sample = time_operation(name, size, device)
            samples.append({"part": name, "sizes": {"bytes": size, "ranks": world}, **sample})
    if left_out:
        say(
            f"{left_out} points were left out after {budget:.0f} s: give a longer --budget, or a smaller --grid"
        )
    return {
        "format": FORMAT,
        "settings": settings,
        "seconds": round(time.perf_counter() - begin, 1),
        "samples": samples,
    }


class _Parts:
    """Makes each point's step."""

    def __init__(self, model: ProfiledModel, grid: Grid, backend: str, device: torch.device) -> None:
        self.model, self.device = model, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.clock = Clock(device, grid.seconds)
        self.like = torch.empty(0, device=device, dtype=self.dtype)
        self.attention = AttentionBench(model, _kernels(backend), device, self.dtype)
        self.layer = megatron_layer(model, device, self.dtype)
        self.ends: Any = keep_gradients(Ends(model).to(device, self.dtype))

    def step(self, point: Point) -> Part:
        if point.part in ("call", "rectangle", "diagonal", "bottom_right", "held_out", "documents", "share"):
            return self.attention.step(point)
        if point.part == "optimizer":
            return optimizer_step(self.layer)
        tokens = point.sizes["tokens"]
        if point.part == "layer":
            return layer_step(self.layer, self.model, tokens, self.like)
        if point.part == "embedding":
            return embedding_step(self.ends, self.model, tokens, self.like)
        return loss_step(self.ends, self.model, tokens, self.like)


def _kernels(backend: str) -> Any:
    if backend == "torch":
        from wlb_megatron.attention.kernels.torch_backend import TorchKernels

        return TorchKernels()
    return kernel_choice.kernels(backend)


def _points(grid: Grid, model: ProfiledModel) -> Iterator[Point]:
    """The points, those that can best be spared last."""
    for tokens in grid.tokens:
        yield Point("layer", {"tokens": tokens})
    for tokens in grid.loss_tokens:
        yield Point("embedding", {"tokens": tokens})
        yield Point("loss", {"tokens": tokens})
    yield Point("optimizer", {"parameters": model.rank_parameters})
    yield from attention_points(grid, model)


def count_points(grid: str, model: ProfiledModel, world: int) -> int:
    """How often `profile` ticks."""
    extra = len(LINKS) * len(GRIDS[grid].bytes) if world > 1 else 0
    return sum(1 for _ in _points(GRIDS[grid], model)) + extra


def _name(point: Point) -> str:
    if "tokens" in point.sizes and point.part != "share":
        return f"{point.part} {point.sizes['tokens']} tokens"
    return point.part


def _settings(model: ProfiledModel, grid: str, backend: str, device: torch.device) -> dict[str, Any]:
    """What all samples of one profile share and depend on."""
    return {
        "model": asdict(model),
        "grid": grid,
        "backend": backend,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU",
        "processors": torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1,
        "host": host_name(),
        "versions": _versions(backend),
    }


def _versions(backend: str) -> dict[str, str]:
    versions = {"wlb_megatron": __version__, "python": platform.python_version(), "torch": torch.__version__}
    packages = KERNELS[backend].packages if backend in KERNELS else ()
    for package in ("transformer_engine", "megatron-core", *packages):
        versions[package] = (installed_version(package) or "unknown") if backend != "torch" else ""
    if backend != "torch":
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: value for name, value in versions.items() if value}


FloatArray = npt.NDArray[np.float64]
LEAST, MOST = 3, 11
HEAT = 0.25
"""Device time for which work runs before it is measured, so that power and clocks have settled (seconds)."""
SLEEP_CYCLES_PER_NS = 2.0
"""Cycles of torch.cuda._sleep per nanosecond, rounded up (an H100 runs at up to 1.98 GHz)."""


@dataclass(frozen=True)
class Timing:
    """Nanoseconds. forward, backward: (median, p20, p80) on the device; host_*: median to launch it."""

    forward: tuple[int, int, int]
    backward: tuple[int, int, int]
    host_forward: int
    host_backward: int
    repeats: int


def _spread(times: FloatArray) -> tuple[int, int, int]:
    middle, low, high = np.percentile(times, (50, 20, 80))
    return int(middle), int(low), int(high)


class Clock:
    """CUDA events on a GPU; the host's clock on a CPU, where work is done when a call returns.

    On a GPU work is repeated without a pause, as in training, because clocks are higher after a pause than they stay.
    If the host launches more slowly than the device runs, the device sleeps until everything is launched.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        """seconds: Device time for which a point is measured, after its warm-up."""
        self.on_gpu = device.type == "cuda"
        self.seconds = seconds

    def measure(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any], *, waits: bool = False
    ) -> Timing:
        """Passes forward's result to backward. waits: they wait for the device, so it must not sleep; otherwise they
        only launch work."""
        for _ in range(2):
            backward(forward())
        return self._on_gpu(forward, backward, waits) if self.on_gpu else self._on_cpu(forward, backward)

    def _on_cpu(self, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> Timing:
        rows: list[tuple[int, int]] = []
        deadline = time.perf_counter_ns() + int(self.seconds * 1e9)
        while len(rows) < LEAST or (len(rows) < MOST and time.perf_counter_ns() < deadline):
            begin = time.perf_counter_ns()
            result = forward()
            middle = time.perf_counter_ns()
            backward(result)
            rows.append((middle - begin, time.perf_counter_ns() - middle))
        there, back = (_spread(np.array(side, dtype=np.float64)) for side in zip(*rows, strict=True))
        return Timing(there, back, 0, 0, len(rows))

    def _on_gpu(self, forward: Callable[[], Any], backward: Callable[[Any], Any], waits: bool) -> Timing:
        device, host = self._train(forward, backward, 1, 0 if waits else 30_000_000)
        run_ns, launch = float(device.sum()), float(host.sum())
        repeats = int(np.clip(self.seconds * 1e9 / max(run_ns, launch), LEAST, MOST))
        warm = int(HEAT * 1e9 / max(run_ns, launch if waits else 0)) + 1 if waits or run_ns > launch else 0
        lead = (launch - run_ns) * repeats * 1.3 if launch > run_ns else 0.0
        asleep = 0 if waits else min(int(lead) + 100_000, 150_000_000)
        device, host = self._train(forward, backward, warm + repeats, asleep)
        there, back = (_spread(side) for side in device[warm:].T)
        # A full queue makes the host wait: the quicker launches are what it takes.
        launched = np.percentile(host, 20, axis=0)
        return Timing(there, back, int(launched[0]), int(launched[1]), repeats)

    def _train(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any], count: int, asleep: int
    ) -> tuple[FloatArray, FloatArray]:
        """float[count, 2]: the device's nanoseconds of each forward and backward, and the host's to launch them."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count + 1)]
        host = []
        torch.cuda.synchronize()
        torch.cuda._sleep(int(asleep * SLEEP_CYCLES_PER_NS))
        events[0].record()
        for number in range(count):
            begin = time.perf_counter_ns()
            result = forward()
            events[2 * number + 1].record()
            middle = time.perf_counter_ns()
            backward(result)
            del result
            events[2 * number + 2].record()
            host.append((middle - begin, time.perf_counter_ns() - middle))
        torch.cuda.synchronize()
        spans = [a.elapsed_time(b) * 1e6 for a, b in pairwise(events)]
        return np.array(spans).reshape(count, 2), np.array(host, dtype=np.float64)


WARM_UP, REPEATS = 3, 9
PAUSE_CYCLES = 20_000_000
"""About 10 ms on an H100."""


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
