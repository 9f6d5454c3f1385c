"""The model of Megatron's flags, as far as plans, costs, kernels and memory depend on it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from wlb_megatron.refusals import delta_nets
from wlb_megatron.workload.cost_model import latent_parameters
from wlb_megatron.workload.model import WHOLE, WHOLE_NET, DeltaNets, Experts, Model, one_kernel

LARGE_VOCABULARY = 131072
"""Assumed where only the tokenizer knows, which is built after the flags are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """The whole model, not a rank's part.

    Args:
        shape: its sizes. layers are those with attention, a vocabulary that only the tokenizer knows is a large one.
        ffn: the MLP's width; the mean of a layer with attention, if MLPs are layers of their own (HybridModel) or
            other layers have none (delta_nets).
        active_ffn: width of the MLP that a token passes, over all its experts.
        value_dim: channels of a value head.
        positions: --max-position-embeddings.
        depths: further tokens that are predicted (--mtp-num-layers).
        vocabulary: rows of the embedding, None if only the tokenizer knows.
        window: earlier keys that a windowed layer's query sees, None without such layers.
        whole_layers: share of the layers that see whole documents.
        rows: a rank's tokens are a multiple of it, in FP8's matrix products.
        dtype: the parameters' type, such as "bfloat16".
        implementation: --transformer-impl.
        stage_layers: layers of the fullest pipeline stage, its virtual stages together, without multi-token
            prediction's.
        stage_patterns: layers of several kinds by their symbols, of each virtual stage of each stage; stage_layers and
            depth_layers are such symbols then, too. A GPTModel's with gated delta nets are those of the stage that may
            have most of them.
        depth_layers: layers of multi-token prediction.
    """

    shape: Model
    ffn: int
    active_ffn: int
    value_dim: int
    positions: int
    depths: int
    vocabulary: int | None
    window: int | None
    whole_layers: float
    rows: int
    dtype: str
    implementation: str
    stage_layers: int | str
    stage_patterns: tuple[tuple[str, ...], ...] | None
    depth_layers: int | str

    @classmethod
    def of(cls, args: Any) -> TrainedModel:
        """args: Megatron's validated arguments."""
        heads, latent = args.num_attention_heads, getattr(args, "multi_latent_attention", False)
        head_dim = args.kv_channels or args.hidden_size // heads
        value_dim, projections, compressed = head_dim, None, None
        if latent:
            dims = args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim
            head_dim, value_dim = sum(dims[:2]), dims[2]
            ranks = args.q_lora_rank or 0, args.kv_lora_rank
            projections = latent_parameters(args.hidden_size, heads, *ranks, dims)
            compressed = sum(ranks) + dims[1]
        grouped = args.group_query_attention and not latent
        window, whole_layers = _windows(args)
        attention, dense, _ = layer_kinds(args)
        ffn, experts = args.ffn_hidden_size * dense // attention, _experts(args)
        depths = getattr(args, "mtp_num_layers", None) or 0
        stage_layers, stage_patterns, depth_layers = _stage_layers(args)
        vocabulary = args.padded_vocab_size or args.vocab_size
        dtype = str(args.params_dtype).removeprefix("torch.")
        shape = Model(
            hidden=args.hidden_size,
            ffn=args.ffn_hidden_size,
            layers=attention,
            heads=heads,
            kv_heads=args.num_query_groups if grouped else heads,
            head_dim=head_dim,
            qk_norm=args.qk_layernorm,
            vocab=vocabulary or LARGE_VOCABULARY,
            gated=args.swiglu,
            tied=not args.untie_embeddings_and_output_weights,
            dropout=args.hidden_dropout > 0,
            dtype_bytes=4 if dtype == "float32" else 2,
            losses=1 + depths,
            experts=experts,
            projections=projections,
            compressed=compressed,
            delta_nets=_delta_nets(args),
        )
        return cls(
            shape=shape,
            ffn=ffn,
            active_ffn=ffn if experts is None else _active_ffn(args, experts),
            value_dim=value_dim,
            positions=args.max_position_embeddings,
            depths=depths,
            vocabulary=vocabulary,
            window=window,
            whole_layers=whole_layers,
            rows=_rows(args),
            dtype=dtype,
            implementation=args.transformer_impl,
            stage_layers=stage_layers,
            stage_patterns=stage_patterns,
            depth_layers=depth_layers,
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer's matrix products that a token passes."""
        return self.shape.parameters_with(self.active_ffn)


def layer_symbols(args: Any) -> str:
    """What layers are, in order: a HybridModel's pattern without its bars and further predictions (after a /); of a
    GPTModel * for attention and G for a gated delta net."""
    if pattern := getattr(args, "hybrid_layer_pattern", None):
        return str(pattern).split("/")[0].replace("|", "")
    every = getattr(args, "linear_attention_freq", None)
    if not delta_nets(args) or every is None:
        return "*" * args.num_layers
    linear = every if isinstance(every, list) else [(n + 1) % every for n in range(args.num_layers)]
    return "".join("G" if layer else "*" for layer in linear)


def layer_kinds(args: Any) -> tuple[int, int, int]:
    """Layers with attention, with an MLP and with experts. All of a GPTModel have the latter two; a HybridModel's
    pattern names them: `*-*E|*-` has 3, 2 and 1."""
    symbols = layer_symbols(args)
    if not getattr(args, "hybrid_layer_pattern", None):
        return symbols.count("*"), args.num_layers, args.num_layers
    attention, dense, experts = (symbols.count(symbol) for symbol in "*-E")
    return attention, dense, experts


def _delta_nets(args: Any) -> DeltaNets | None:
    layers = layer_symbols(args).count("G")
    if not layers:
        return None
    return DeltaNets(
        layers=layers,
        key_heads=args.linear_num_key_heads or 16,
        value_heads=args.linear_num_value_heads or 32,
        key_dim=args.linear_key_head_dim or 128,
        value_dim=args.linear_value_head_dim or 128,
        width=args.linear_conv_kernel_dim or 4,
    )


def _experts(args: Any) -> Experts | None:
    if not args.num_experts or not layer_kinds(args)[2]:
        return None
    grouped = getattr(args, "moe_grouped_gemm", False)
    return Experts(
        args.num_experts,
        args.moe_ffn_hidden_size or args.ffn_hidden_size,
        args.expert_model_parallel_size or 1,
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        args.moe_router_topk,
        shared=getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
        dense_layers=_dense_layers(args),
        one_kernel=one_kernel(grouped and not getattr(args, "fp8", None), os.environ),
        fused_permutation=getattr(args, "moe_permute_fusion", False),
    )


def _dense_layers(args: Any) -> int:
    """Layers of a GPTModel without experts. --moe-layer-freq 2: every second layer has them, from the first on."""
    if getattr(args, "hybrid_layer_pattern", None):
        return 0
    frequency = getattr(args, "moe_layer_freq", None) or 1
    routed = sum(frequency) if isinstance(frequency, list) else -(-args.num_layers // frequency)
    return int(args.num_layers - routed)


def _active_ffn(args: Any, experts: Experts) -> int:
    """Of a layer with attention, in the mean; other layers may have the experts or MLPs."""
    attention, dense, layers = layer_kinds(args)
    ffn = experts.ffn * experts.chosen
    if layers == attention:
        return ffn
    mlp_layers = dense if getattr(args, "hybrid_layer_pattern", None) else 0
    return (ffn * layers + args.ffn_hidden_size * mlp_layers) // attention


def balancing_of(args: Any) -> tuple[str, ...]:
    """Kinds of balancing losses that the flags name, whether there are experts or not."""
    kinds = args.moe_router_load_balancing_type
    return tuple(kinds) if isinstance(kinds, list) else (str(kinds),)


def _windows(args: Any) -> tuple[int | None, float]:
    from wlb_megatron.attention.core_attention import window_of

    size, skip = window_of(args), getattr(args, "window_attn_skip_freq", None)
    if size is None:
        return None, 1.0
    from megatron.core.transformer.utils import is_layer_window_attention

    numbers = [number for number, symbol in enumerate(layer_symbols(args), 1) if symbol == "*"]
    near = [is_layer_window_attention(args.window_size, skip, number) for number in numbers]
    return size, 1 - sum(near) / len(near)


def _rows(args: Any) -> int:
    """16 with FP8, 32 with MXFP8 (Megatron's get_fp8_align_size)."""
    return 1 if not getattr(args, "fp8", None) else 32 if args.fp8_recipe == "mxfp8" else 16


def _stage_layers(args: Any) -> tuple[int | str, tuple[tuple[str, ...], ...] | None, int | str]:
    """stage_layers, stage_patterns and depth_layers of a TrainedModel."""
    depths = getattr(args, "mtp_num_layers", None) or 0
    if pattern := getattr(args, "hybrid_layer_pattern", None):
        main, *further = pattern.split("/")
        patterns = _stage_patterns(main, args)
        fullest = max(
            ("|".join(chunks) for chunks in patterns),
            key=lambda stage: (stage.count("*") + stage.count("G"), len(stage)),
        )
        return fullest, patterns, "".join(further)
    if "G" in layer_symbols(args):
        patterns = _net_stages(args)
        return "|".join(patterns[0]), patterns, WHOLE * depths
    return _fullest_stage(args), None, depths


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
