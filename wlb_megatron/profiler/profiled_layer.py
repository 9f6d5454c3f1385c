"""Megatron's own transformer layer without attention, and its cross entropy, for the profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from wlb_megatron.profiler.layer import NoAttention, keep_gradients
from wlb_megatron.workload.profile import ProfiledModel


def megatron_layer(model: ProfiledModel) -> tuple[nn.Module, Callable[..., Tensor], str]:
    """A layer of one tensor-parallel rank's shape, bf16, on this GPU: called with [t, 1, hidden] and rotary angles.

    Its cross entropy and its name beside it. Without sequence parallelism's split of norms and residuals. With experts
    a router spreads t tokens over this rank's experts, as many rows as all expert-parallel ranks send them in mean.
    ImportError where Megatron or Transformer Engine is missing.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn // model.tp,
        **_experts(model),
        num_attention_heads=model.rank_heads,
        num_query_groups=model.rank_kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        gated_linear_unit=model.gated,
        activation_func=functional.silu if model.gated else functional.gelu,
        add_bias_linear=False,
        bias_activation_fusion=model.gated or model.experts is None,  # experts have no other fused activation
        bias_dropout_fusion=True,
        apply_rope_fusion=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=model.fused,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(model.rank_experts or None, moe_grouped_gemm=True)
    spec.submodules.self_attention.submodules.core_attention = NoAttention
    layer = build_module(spec, config=config).cuda()
    name = "Megatron's TransformerLayer"
    if model.experts is not None:
        # TEGroupedMLP, or SequentialMLP with a Transformer Engine that has no grouped products.
        name += f" with {model.rank_experts} experts ({type(layer.mlp.experts).__name__})"
        if model.experts.tensor < model.tp:
            layer.mlp = _Part(layer.mlp, model.tp // model.experts.tensor)
    return _Layer(keep_gradients(layer)), vocab_parallel_cross_entropy, name


def _experts(model: ProfiledModel) -> dict[str, Any]:
    """TransformerConfig's arguments of a rank's experts, as if they were all."""
    experts = model.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": model.rank_experts,
        "moe_router_topk": experts.chosen,
        "moe_ffn_hidden_size": experts.ffn // experts.tensor,
        "moe_shared_expert_intermediate_size": experts.shared // experts.tensor or None,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


class _Part(nn.Module):
    """Experts on one of `parts` of the tokens: with TP 4 and expert-tensor parallel 1, a rank's are a quarter."""

    def __init__(self, experts: Any, parts: int) -> None:
        super().__init__()
        self.experts, self.parts = experts, parts

    def forward(self, hidden: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        tokens = -(-len(hidden) // self.parts)
        out, bias = self.experts(hidden[:tokens], **options)
        return torch.cat((out, hidden[tokens:])), bias


class _Layer(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        out = self.layer(hidden_states=x, attention_mask=None, rotary_pos_emb=angles)
        return out[0] if isinstance(out, tuple) else out
