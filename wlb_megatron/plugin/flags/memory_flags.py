"""Megatron's flags that decide what a GPU keeps of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlags:
    """stage_layers: of the fullest pipeline stage, its virtual stages together, without multi-token prediction's.
    fully_sharded: FSDP spreads weights and gradients over data-parallel ranks. recompute_layers, recompute_block: how
    many layers at once, and by blocks, where they are recomputed in full."""

    stage_layers: int
    distributed_optimizer: bool
    fully_sharded: bool = False
    recompute_layers: int = 1
    recompute_block: bool = False

    @classmethod
    def of(cls, args: Any) -> MemoryFlags:
        """args: Megatron's validated arguments."""
        megatron_fsdp = getattr(args, "use_megatron_fsdp", False)
        strategy = getattr(args, "data_parallel_sharding_strategy", None)
        return cls(
            stage_layers=_fullest_stage(args),
            distributed_optimizer=args.use_distributed_optimizer,
            fully_sharded=bool(getattr(args, "use_torch_fsdp2", False))
            or (megatron_fsdp and strategy == "optim_grads_params"),
            recompute_layers=args.recompute_num_layers or 1,
            recompute_block=args.recompute_method == "block",
        )


def _fullest_stage(args: Any) -> int:
    stages = args.pipeline_model_parallel_size
    placed = getattr(args, "pipeline_model_parallel_layout", None)
    if placed is not None:
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        if isinstance(placed, str):
            placed = PipelineParallelLayerLayout.from_str(placed, stages)
        return max(sum(chunk.count(LayerType.decoder) for chunk in stage) for stage in placed.layout)
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    end_layers = [layers for layers in (getattr(args, end, None) for end in ends) if layers is not None]
    counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    between = args.num_layers - sum(end_layers) + sum(bool(getattr(args, layer, False)) for layer in counted)
    return max([*end_layers, -(-between // max(1, stages - len(end_layers)))])
