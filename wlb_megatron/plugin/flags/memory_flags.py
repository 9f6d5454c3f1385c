"""Megatron's flags that decide what a GPU keeps of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wlb_megatron.plugin.flags.trained_model import layer_symbols
from wlb_megatron.workload.memory import WHOLE, WHOLE_NET


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlags:
    """Megatron's flags that decide how much memory a step takes.

    Args:
        stage_layers: layers of the fullest pipeline stage, its virtual stages together, without multi-token
            prediction's.
        ffn: width of an MLP.
        fully_sharded: FSDP spreads weights and gradients over data-parallel ranks.
        recompute_layers: how many layers are recomputed at once, where they are recomputed in full.
        recompute_block: they are recomputed by blocks.
        patterns: layers of several kinds by their symbols, of each virtual stage of each stage; stage_layers and
            depths are such symbols then, too. A GPTModel's with gated delta nets are those of the stage that may have
            most of them.
        depths: layers of multi-token prediction.
    """

    stage_layers: int | str
    ffn: int
    fully_sharded: bool = False
    recompute_layers: int = 1
    recompute_block: bool = False
    patterns: tuple[tuple[str, ...], ...] | None = None
    depths: int | str = 0

    @classmethod
    def of(cls, args: Any) -> MemoryFlags:
        """args: Megatron's validated arguments."""
        megatron_fsdp = getattr(args, "use_megatron_fsdp", False)
        strategy = getattr(args, "data_parallel_sharding_strategy", None)
        layers: int | str = _fullest_stage(args)
        depths, patterns = getattr(args, "mtp_num_layers", None) or 0, None
        if pattern := getattr(args, "hybrid_layer_pattern", None):
            main, *further = pattern.split("/")
            patterns, depths = _stage_patterns(main, args), "".join(further)
            layers = max(
                ("|".join(chunks) for chunks in patterns),
                key=lambda stage: (stage.count("*") + stage.count("G"), len(stage)),
            )
        elif "G" in layer_symbols(args):
            patterns, depths = _net_stages(args), WHOLE * (getattr(args, "mtp_num_layers", None) or 0)
            layers = "|".join(patterns[0])
        return cls(
            stage_layers=layers,
            ffn=args.ffn_hidden_size,
            fully_sharded=bool(getattr(args, "use_torch_fsdp2", False))
            or (megatron_fsdp and strategy == "optim_grads_params"),
            recompute_layers=args.recompute_num_layers or 1,
            recompute_block=args.recompute_method == "block",
            patterns=patterns,
            depths=depths,
        )


def _net_stages(args: Any) -> tuple[tuple[str, ...], ...]:
    """Those of a GPTModel with gated delta nets: of each stage the layers, as many as the fullest has, with most of
    them. Of NNNT on two stages, (NN,) twice."""
    kinds = layer_symbols(args).translate({ord("*"): WHOLE, ord("G"): WHOLE_NET})
    count = _fullest_stage(args)
    runs = [kinds[first : first + count] for first in range(len(kinds) - count + 1)]
    stage = max(runs, key=lambda layers: layers.count(WHOLE_NET))
    size = -(-count // (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1))
    chunks = tuple(stage[first : first + size] for first in range(0, count, size))
    return (chunks,) * args.pipeline_model_parallel_size


def _stage_patterns(main: str, args: Any) -> tuple[tuple[str, ...], ...]:
    """A pattern by pipeline stage and virtual stage: *-|--|*E|-- of two stages has (*-, *E) and (--, --)."""
    stages, chunks = args.pipeline_model_parallel_size, main.split("|")
    if len(chunks) < stages:  # cut evenly
        size = -(-len(main) // stages)
        chunks = [main[start : start + size] for start in range(0, len(main), size)]
    return tuple(tuple(chunks[stage::stages]) for stage in range(stages))


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
    counted_layers = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    middle_layers = (
        args.num_layers - sum(end_layers) + sum(bool(getattr(args, layer, False)) for layer in counted_layers)
    )
    return max([*end_layers, -(-middle_layers // max(1, stages - len(end_layers)))])
