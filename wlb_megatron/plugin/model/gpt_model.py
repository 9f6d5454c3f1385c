"""The model of Megatron's arguments, for `-m wlb_megatron.pretrain_gpt` on wheels before 0.19, which bring no builder.

It stands for Megatron's own builder and so takes Megatron's arguments.
"""

from __future__ import annotations

from typing import Any

from wlb_megatron.refusals import Refused


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """megatron.core's model of the global arguments: dense, with experts, heterogeneous, of --spec, or hybrid."""
    from megatron.core.models.gpt import GPTModel
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    if args.mtp_num_layers:
        raise Refused(
            "wlb_megatron.pretrain_gpt builds no multi-token prediction on megatron-core before 0.19: "
            "start a checkout's pretrain_gpt.py through wlb_megatron.launch"
        )
    config = config or core_transformer_config_from_args(args)
    model: Any = GPTModel
    if getattr(args, "hybrid_layer_pattern", None):
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        model = HybridModel
        arguments = {
            "hybrid_stack_spec": hybrid_stack_spec if args.spec is None else _named_spec(args.spec),
            "hybrid_layer_pattern": args.hybrid_layer_pattern,
        }
    else:
        arguments = {
            "transformer_layer_spec": _layer_spec(args, config, vp_stage),
            "rope_scaling": args.use_rope_scaling,
            "rope_scaling_factor": args.rope_scaling_factor,
        }
    return model(
        config=config,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
        **arguments,
    )


def _named_spec(names: list[str]) -> Any:
    from megatron.core.transformer.spec_utils import import_module

    spec = import_module(names)
    if spec is None:  # Megatron logs a failed import and goes on with its default attention
        raise Refused(f"--spec {' '.join(names)}: no such module or attribute")
    return spec


def _layer_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
        get_gpt_heterogeneous_layer_spec,
    )

    te = args.transformer_impl == "transformer_engine"
    if args.spec is not None:
        return _named_spec(args.spec)
    if args.heterogeneous_layers_config_path is not None or args.heterogeneous_layers_config_encoded_json:
        return get_gpt_heterogeneous_layer_spec(config, te)
    if args.experimental_attention_variant is not None:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        return variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=te,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
