"""Measures all points of a model's profile. It saves finished points, so an interrupted run resumes."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wlb_megatron import __version__
from wlb_megatron.attention.kernels import kernel_choice
from wlb_megatron.errors import installed_version
from wlb_megatron.profiler.clock import OPERATIONS, Clock, time_operation
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
    torch_layer,
)
from wlb_megatron.profiler.points import GRIDS, Grid, Point, attention_points
from wlb_megatron.registry import KERNELS
from wlb_megatron.whole_files import write_whole
from wlb_megatron.workload.profile import FORMAT, ProfiledModel, host_name

Say = Callable[[str], None]


def profile(
    model: ProfiledModel, *, grid: str, backend: str, partial: Path, budget: float, tick: Say, say: Say
) -> dict[str, Any]:
    """The measurements, JSON-able: `settings`, `samples` and more. Only rank 0's are complete.

    partial: a file that is kept up to date while measuring. If it exists with the same settings, its samples are not
    measured again. budget: seconds after which no further point begins. tick: called with each point. say: called
    with messages.
    """
    begin = time.perf_counter()
    device = torch.device("cpu") if backend == "torch" else torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(1)
    settings = _settings(model, grid, backend, device)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    parts = _Parts(model, GRIDS[grid], backend, device, say)
    samples = _read_partial(partial, settings, say) if rank == 0 else {}
    left_out = 0
    for point in _points(GRIDS[grid], model) if rank == 0 else ():
        tick(_name(point))
        if point.key in samples:
            continue
        if time.perf_counter() - begin > budget:
            left_out += 1
            continue
        try:
            waits = point.part == "layer" and model.experts is not None  # for its routes
            timing = parts.clock.measure(*parts.step(point), waits=waits)
        except RuntimeError as error:  # out of memory, or a shape that the kernels do not take
            say(f"{point.key[:100]} is left out: {str(error).splitlines()[0][:200]}")
            torch.cuda.empty_cache()
            continue
        samples[point.key] = {"part": point.part, "sizes": point.sizes, **asdict(timing)}
        write_whole(
            partial, json.dumps({"settings": settings, "samples": list(samples.values())}) + "\n", "--out"
        )
    if world > 1:
        for name, size in product(OPERATIONS, GRIDS[grid].bytes):
            tick(f"{name} {size} bytes")
            sample = time_operation(name, size, device)
            samples[f"{name} {size}"] = {"part": name, "sizes": {"bytes": size, "ranks": world}, **sample}
    if left_out:
        say(
            f"{left_out} points were left out after {budget:.0f} s: give a longer --budget, or a smaller --grid"
        )
    return {
        "format": FORMAT,
        "settings": settings,
        "layer": parts.layer_source,
        "layer_parameters": model.rank_parameters_passed,
        "seconds": round(time.perf_counter() - begin, 1),
        "samples": list(samples.values()),
    }


class _Parts:
    """Makes each point's step; modules are built when first needed."""

    def __init__(
        self, model: ProfiledModel, grid: Grid, backend: str, device: torch.device, say: Say
    ) -> None:
        self.model, self.device = model, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.clock = Clock(device, grid.seconds)
        self.like = torch.empty(0, device=device, dtype=self.dtype)
        self.attention = AttentionBench(model, _kernels(backend), device, self.dtype)
        self.layer, self.cross_entropy, self.layer_source = self._layer(backend, say)
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
        return loss_step(self.ends, self.model, tokens, self.like, self.cross_entropy)

    def _layer(self, backend: str, say: Say) -> tuple[Any, Any, str]:
        if backend != "torch":
            try:
                return megatron_layer(self.model)
            except (ImportError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
                say(
                    f"Megatron's layer cannot be built ({error}): measuring torch modules of the same shape instead"
                )
        return torch_layer(self.model, self.device, self.dtype), None, "torch modules"


def _kernels(backend: str) -> Any:
    if backend == "torch":
        from wlb_megatron.attention.kernels.torch_backend import TorchKernels

        return TorchKernels()
    return kernel_choice.kernels(kernel_choice.kernels_name(backend))


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
    extra = len(OPERATIONS) * len(GRIDS[grid].bytes) if world > 1 else 0
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


def _read_partial(path: Path, settings: dict[str, Any], say: Say) -> dict[str, dict[str, Any]]:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["settings"] != settings:
            say(f"{path} is of another model, GPU, host, version or grid: starting over")
            return {}
        samples = {f"{s['part']} {sorted(s['sizes'].items())}": s for s in saved["samples"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        say(f"{path} is damaged: starting over")
        return {}
    say(f"resuming from {path}: {len(samples)} points are done")
    return samples
