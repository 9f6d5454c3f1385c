"""Which micro-batch and window fit a GPU's memory, counted as training counts them (workload/memory.py)."""

from __future__ import annotations

from typing import NamedTuple

from wlb_megatron.simulator.job import Job
from wlb_megatron.workload.memory import GIB, LEAST, ModelShape, ParallelLayout, memory_needed

MARGIN = 0.10


class Fits(NamedTuple):
    """Tokens of the longest micro-batch and of the longest window, which needs 1.25 windows; 0: not even one token."""

    micro_batch: int
    window: int
    gib: float


def fits(job: Job, gib: float, *, keep_keys: bool = True) -> Fits | None:
    """With sequence parallelism beside tensor parallelism, and the distributed optimizer. None with experts: how many
    tokens one gets is not known ahead."""
    if job.trainer.experts:
        return None
    shape, layout = described(job, keep_keys)
    room, step = int(gib * GIB * (1 - MARGIN)), job.alignment
    low, high = 0, 1 << 24  # in multiples of the alignment; what is needed grows with the tokens
    while low < high:
        middle = (low + high + 1) // 2
        if memory_needed(shape, layout, middle * step) <= room:
            low = middle
        else:
            high = middle - 1
    return Fits(low * step, low * step * LEAST[1] // LEAST[0] // 1024 * 1024, gib)


def described(job: Job, keep_keys: bool) -> tuple[ModelShape, ParallelLayout]:
    """The job in workload.memory's terms."""
    shape, sizes, further = job.model.shape, job.model.layout, job.trainer.mtp
    return ModelShape(
        hidden=shape.hidden,
        ffn=shape.ffn,
        layers=-(-shape.layers // sizes.pp) + further,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        gated=shape.gated,
        losses=1 + further,
    ), ParallelLayout(
        tensor=sizes.tp,
        context=sizes.cp,
        pipeline=sizes.pp,
        data=sizes.dp,
        virtual=sizes.chunks,
        group=sizes.pp,
        micro_batches=job.micro_batches,
        sequence=sizes.tp > 1,
        distributed_optimizer=True,
        recompute=job.model.recompute,
        keep_keys=keep_keys,
    )
