"""Layers of a HybridModel in plain torch, because Megatron's own need Transformer Engine.

For `--spec scripts.local_hybrid stack`, with --transformer-impl local: `*`, `-`, `E` and `G` of --hybrid-layer-pattern.
`G` also needs the folder tests/stand_ins on PYTHONPATH.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

hybrid_block.TENorm = WrappedTorchNorm  # the last norm is part of no spec

_dense = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
_experts = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False, normalization="RMSNorm").submodules


def _feed_forward(module: type, made_of: TransformerLayerSubmodules) -> ModuleSpec:
    names = ("pre_mlp_layernorm", "mlp", "mlp_bda", "sharded_state_dict_keys_map")
    parts = {name: getattr(made_of, name) for name in names}
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**parts))


stack = ModuleSpec(
    module=hybrid_block.HybridStack,
    submodules=hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=_dense.input_layernorm,
                self_attention=_dense.self_attention,
                self_attn_bda=_dense.self_attn_bda,
                sharded_state_dict_keys_map=_dense.sharded_state_dict_keys_map,
            ),
        ),
        gdn_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=_dense.input_layernorm,
                self_attention=ModuleSpec(
                    module=GatedDeltaNet,
                    submodules=GatedDeltaNetSubmodules(
                        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
                    ),
                ),
                self_attn_bda=_dense.self_attn_bda,
            ),
        ),
        mlp_layer=_feed_forward(MLPLayer, _dense),
        moe_layer=_feed_forward(TransformerLayer, _experts),
        mtp_block_spec=ModuleSpec(
            module=mtp.MultiTokenPredictionBlock,
            submodules=mtp.MultiTokenPredictionBlockSubmodules(
                layer_specs=[
                    ModuleSpec(
                        module=mtp.MultiTokenPredictionLayer,
                        submodules=mtp.MultiTokenPredictionLayerSubmodules(
                            enorm=WrappedTorchNorm,
                            hnorm=WrappedTorchNorm,
                            eh_proj=ColumnParallelLinear,
                            mtp_model_layer=None,
                            layer_norm=WrappedTorchNorm,
                        ),
                    )
                ]
            ),
        ),
    ),
)
