"""Megatron's flags that decide what a GPU keeps of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wlb_megatron.plugin.flags.trained_model import layer_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlags:
    """stage_layers: of the fullest pipeline stage, its virtual stages together, without multi-token prediction's.
    fully_sharded: FSDP spreads weights and gradients over data-parallel ranks. recompute_layers, recompute_block: how
    many layers at once, and by blocks, where they are recomputed in full. recompute_inputs: see ParallelLayout.

    Layers are those with attention. In a HybridModel's *-*-, of 4 layers of its own, 1 recomputed alone is half of one.
    """

    stage_layers: int
    distributed_optimizer: bool
    fully_sharded: bool = False
    recompute_layers: int = 1
    recompute_block: bool = False
    recompute_inputs: int = 1

    @classmethod
    def of(cls, args: Any) -> MemoryFlags:
        """args: Megatron's validated arguments."""
        megatron_fsdp = getattr(args, "use_megatron_fsdp", False)
        strategy = getattr(args, "data_parallel_sharding_strategy", None)
        block, number, attention = (
            args.recompute_method == "block",
            args.recompute_num_layers or 1,
            layer_kinds(args)[0],
        )
        inputs = -(-args.num_layers // (attention * (1 if block else number)))
        return cls(
            stage_layers=_fullest_stage(args),
            distributed_optimizer=args.use_distributed_optimizer,
            fully_sharded=bool(getattr(args, "use_torch_fsdp2", False))
            or (megatron_fsdp and strategy == "optim_grads_params"),
            recompute_layers=max(1, number * attention // args.num_layers),
            recompute_block=block,
            recompute_inputs=max(1, inputs),
        )


def _fullest_stage(args: Any) -> int:
    stages = args.pipeline_model_parallel_size
    if pattern := getattr(args, "hybrid_layer_pattern", None):
        chunks = pattern.split("/")[0].split("|")
        if len(chunks) < stages:  # cut evenly
            (layers,), size = chunks, -(-args.num_layers // stages)
            chunks = [layers[start : start + size] for start in range(0, len(layers), size)]
        return max(sum(chunk.count("*") for chunk in chunks[stage::stages]) for stage in range(stages))
    placed = getattr(args, "pipeline_model_parallel_layout", None)
    if placed is not None:
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        if isinstance(placed, str):
            placed = PipelineParallelLayerLayout.from_str(placed, stages)
        return max(sum(chunk.count(LayerType.decoder) for chunk in stage) for stage in placed.layout)
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    end_layers = [layers for layers in (getattr(args, end, None) for end in ends) if layers is not None]
    counted_layers = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    middle_layers = (
        args.num_layers - sum(end_layers) + sum(bool(getattr(args, layer, False)) for layer in counted_layers)
    )
    return max([*end_layers, -(-middle_layers // max(1, stages - len(end_layers)))])
