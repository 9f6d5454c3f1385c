"""Describes a job in the terms of workload/memory.py, so that memory is counted as in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wlb_megatron.packing.chunks.chunk_limits import Trainer
from wlb_megatron.packing.memory_limits import MARGIN, GpuMemory
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.workload.memory import GIB, WHOLE, Experts, ParallelLayout, StageShape


@dataclass(frozen=True, slots=True)
class MemoryChoices:
    """Megatron's flags that change memory alone; by default as the commands assume where no launch command says."""

    distributed_optimizer: bool = True
    sequence: bool = True
    tied: bool = False
    dropout: bool = False


def gpu_memory(
    model: LayerModel,
    trainer: Trainer,
    gib: float,
    *,
    window: int,
    micro_batches: int,
    alignment: int,
    margin: float = MARGIN,
    experts: Experts | None = None,
    choices: MemoryChoices | None = None,
) -> GpuMemory:
    """The GPU's memory as the planner counts it. gib: of a GPU. micro_batches:
    windows of a data-parallel rank and step.
    """
    shape, sizes, choices = model.shape, model.layout, choices or MemoryChoices()
    layers = tuple(tuple(model.layers_of(p, c) for c in range(sizes.chunks)) for p in range(sizes.pp))
    counted: dict[str, Any] = {"layers": layers, "depths": trainer.mtp}
    fullest: int | str = -(-shape.layers // sizes.pp) + trainer.mtp
    if nets := shape.delta_nets:
        kinds = [
            [WHOLE * count + "G" * -(-count * nets.layers // shape.layers) for count in stage]
            for stage in layers
        ]
        counted = {"layers": tuple(map(tuple, kinds)), "depths": WHOLE * trainer.mtp}
        fullest = "|".join(max(kinds, key=lambda stage: len("".join(stage)))) + WHOLE * trainer.mtp
    described = StageShape(
        hidden=shape.hidden,
        ffn=shape.ffn,
        layers=fullest,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        gated=shape.gated,
        tied=choices.tied,
        dropout=choices.dropout,
        losses=1 + trainer.mtp,
        experts=experts,
        projections=shape.projections,
        delta_nets=nets,
    )
    layout = ParallelLayout(
        tensor=sizes.tp,
        context=sizes.cp,
        pipeline=sizes.pp,
        data=sizes.dp,
        virtual=sizes.chunks,
        group=sizes.pp,
        micro_batches=micro_batches,
        sequence=sizes.tp > 1 and choices.sequence,
        distributed_optimizer=choices.distributed_optimizer,
        fully_sharded=trainer.shards_weights,
        losses_in_forward=trainer.shards_weights,
        recompute=model.recompute,
        recompute_layers=model.recompute_blocks or model.recompute_layers,
        recompute_block=model.recompute_blocks is not None,
        keep_keys=not model.regather,
    )
    return GpuMemory(
        *(int(gib * GIB), described, layout, window, alignment, margin),
        experts=experts,
        **counted,
    )
