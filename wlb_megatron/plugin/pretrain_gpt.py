"""Pre-training entries on pip's megatron-core alone (its wheel has the loop, but no pretrain_gpt.py)."""

from __future__ import annotations

import sys
import time
from typing import Any

from wlb_megatron.plugin.flags.refusal_printing import refuse
from wlb_megatron.refusals import Refused

USAGE = """usage: torchrun ... -m wlb_megatron.{name} <Megatron's flags> [--wlb-...]
       Megatron's flags are those of its {name}.py"""


def main(name: str = "pretrain_gpt") -> None:
    """Parse Megatron's and the plugin's flags, and run Megatron's own pretrain().

    name: the script of Megatron's that this stands for. pretrain_gpt builds a GPTModel, pretrain_hybrid a HybridModel.
    """
    started = time.time()
    from wlb_megatron.plugin.launch import enable, flags_help

    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE.format(name=name), flags_help(), sep="\n\n")
        return

    enable()
    if "--wlb-off" in sys.argv:
        refuse(f"--wlb-off: wlb_megatron.{name} has no data of its own: run Megatron's {name}.py instead")
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, set_startup_timestamps

    set_startup_timestamps(program_start=started, main_entry=time.time())
    pretrain(
        train_valid_test_dataset_provider=_replaced,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=_replaced,
        **_model(name),
    )


def _model(name: str) -> dict[str, Any]:
    """What pretrain() of this release makes the model of. Parses the arguments."""
    from megatron.training import argument_utils, arguments

    args = arguments.parse_and_validate_args()
    hybrid = args.hybrid_layer_pattern is not None
    if hybrid != (name == "pretrain_hybrid"):
        other_entry = "pretrain_hybrid" if hybrid else "pretrain_gpt, or give the pattern"
        refuse(
            f"--hybrid-layer-pattern {'is not for' if hybrid else 'is needed by'} {name}: use {other_entry}"
        )
    if not hasattr(argument_utils, "gpt_config_from_args"):  # before 0.19
        settings = argument_utils.pretrain_cfg_container_from_args(args)
        return {"cfg_container": settings, "model_provider": model_provider}
    of_model = argument_utils.hybrid_config_from_args if hybrid else argument_utils.gpt_config_from_args
    config = of_model(args)
    return {"cfg_container": argument_utils.pretrain_cfg_container_from_args(args, config)}


def _replaced(*_: Any, **__: Any) -> Any:
    raise RuntimeError("wlb_megatron's hook on pretrain() did not replace the provider and forward step")


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """megatron.core's model of the global arguments: dense, with experts, heterogeneous, of --spec, or hybrid.

    For wheels before 0.19, which bring no builder.
    """
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
