"""The settings that a user could train with, on the same model, documents and GPUs: what a search tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wlb_megatron.arguments import flags_of
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.simulator.divisible import check_heads
from wlb_megatron.simulator.job import DEFAULT_GIB, Job
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.workload.model import Layout

VIRTUAL = (1, 2, 3, 4, 6, 8)
"""Model chunks of a stage that are tried, where they divide its layers."""

PER_WINDOW = ("auto", "1", "2", "4")
"""Micro-batches for each window."""


@dataclass(frozen=True)
class Candidate:
    """A job and its settings."""

    job: Job
    config: WlbConfig


def as_given(job: Job, config: WlbConfig) -> Candidate:
    """The job to search from: Lmax and all that is kept follow the GPU's memory, as in training."""
    return Candidate(replace(job, gib=job.gib or DEFAULT_GIB), config)


def schedules(start: Candidate) -> list[Candidate]:
    """Other numbers of virtual stages, recomputation, chunks: all of them together."""
    candidates = []
    for job in (variant for chunked in virtual_stages(start.job) for variant in recomputations(chunked)):
        candidates += [Candidate(job, config) for config in chunk_choices(start.config)]
    return [candidate for candidate in candidates if candidate != start]


def micro_batch_counts(candidate: Candidate) -> list[Candidate]:
    """Other numbers of micro-batches for each window."""
    config = candidate.config
    if config.fixed_windows or config.release != "balance" or candidate.job.model.layout.pipeline == 1:
        return []
    counts = [count for count in PER_WINDOW if count != config.micro_batches_per_window]
    return [replace(candidate, config=replace(config, micro_batches_per_window=count)) for count in counts]


def virtual_stages(job: Job) -> list[Job]:
    layout, layers = job.model.layout, job.model.shape.layers
    if layout.pipeline == 1:
        return [job]
    counts = sorted({layout.virtual, *(v for v in VIRTUAL if layers % (layout.pipeline * v) == 0)})
    return [with_layout(job, replace(layout, virtual=count), job.micro_batches) for count in counts]


def recomputations(job: Job) -> list[Job]:
    """As given, in full (of which each step keeps what fits), and none."""
    kinds = dict.fromkeys((job.model.recompute, "full", "none"))
    return [job if kind == job.model.recompute else with_recompute(job, kind) for kind in kinds]


def with_recompute(job: Job, kind: str, block: int | None = None) -> Job:
    """block: layers of a model chunk that are recomputed; None: all."""
    return replace(job, model=replace(job.model, recompute=kind, recompute_layers=1, recompute_blocks=block))


def chunk_choices(config: WlbConfig) -> list[WlbConfig]:
    """Documents whole, and in chunks. A delay that is given leaves no choice."""
    if config.fixed_windows or config.max_delay or config.cp_mode == "dynamic" or config.overlong == "chunk":
        return [config]
    return [replace(config, chunks="off"), replace(config, chunks="on", max_delay=None)]


def with_layout(job: Job, layout: Layout, micro_batches: int) -> Job:
    trainer = replace(job.trainer, stages=layout.pipeline, tensor=layout.tensor)
    return replace(job, model=replace(job.model, layout=layout), micro_batches=micro_batches, trainer=trainer)


def layouts(start: Candidate) -> Iterator[Candidate]:
    """All ways to spread tensor, context and pipeline parallelism over the same GPUs that Megatron takes and whose
    weights fit. Tensor-parallel ranks stay within a node. A profile is of one tensor-parallel size."""
    job = start.job
    layout = job.model.layout
    gpus, batch = layout.gpus, job.micro_batches * layout.data
    for tp in _divisors(min(gpus, job.model.assumptions.node)):
        if job.model.costs is not None and tp != job.model.layout.tensor:
            continue
        for cp in _divisors(gpus // tp) if gpus % tp == 0 else ():
            for pp in _divisors(gpus // (tp * cp)):
                dp = gpus // (tp * cp * pp)
                if batch % (dp * job.micro_batch_size):
                    continue
                try:
                    sizes = replace(layout, tensor=tp, context=cp, pipeline=pp, data=dp, virtual=1)
                    moved = with_layout(job, sizes, batch // dp)
                except (ValueError, WlbError):
                    continue
                if _takes(moved) and moved.weights_problem() is None:
                    yield replace(start, job=moved)


def _takes(job: Job) -> bool:
    """Whether Megatron divides the model and the window so."""
    shape, layout, experts = job.model.shape, job.model.layout, job.model.shape.experts
    try:
        check_heads(shape.heads, shape.kv_heads, tp=layout.tensor)
    except WlbError:
        return False
    divides = shape.layers % layout.pipeline == 0 and job.window % job.alignment == 0
    if shape.kv_heads % layout.tensor and layout.tensor % shape.kv_heads:
        return False
    if experts is None:
        return divides and shape.ffn % layout.tensor == 0
    stage = layout.tensor * layout.context * layout.data
    return divides and stage % (experts.parallel * experts.tensor) == 0


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def changes(start: Candidate, end: Candidate) -> str:
    """The flags by which another job differs from the given one, "" for none."""
    flags = []
    before, after = _megatron_flags(start.job), _megatron_flags(end.job)
    flags += [f"{flag} {value}" for flag, value in after.items() if before.get(flag) != value]
    if before.keys() - after.keys() and end.job.model.recompute == "none":
        flags.append("(without --recompute-*)")
    flags_before, flags_after = flags_of(start.config).split(" --"), flags_of(end.config).split(" --")
    flags += [f"--{flag.removeprefix('--')}" for flag in flags_after if flag and flag not in flags_before]
    plain = WlbConfig()
    for name in ("chunks", "micro_batches_per_window", "recompute"):
        value = getattr(end.config, name)
        if value == getattr(plain, name) != getattr(start.config, name):
            flags.append(f"--wlb-{name.replace('_', '-')} {value}")
    return " ".join(flags)


def _megatron_flags(job: Job) -> dict[str, str]:
    model: LayerModel = job.model
    layout = model.layout
    flags = {
        "--tensor-model-parallel-size": str(layout.tensor),
        "--context-parallel-size": str(layout.context),
        "--pipeline-model-parallel-size": str(layout.pipeline),
        "--num-virtual-stages-per-pipeline-rank": str(layout.virtual),
    }
    if model.recompute != "none":
        flags["--recompute-granularity"] = model.recompute
    if model.recompute == "full":
        block = model.recompute_blocks
        flags["--recompute-method"] = "uniform" if block is None else "block"
        flags["--recompute-num-layers"] = str(block or model.recompute_layers)
    return flags
