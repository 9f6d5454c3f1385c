"""The model side: core attention in the layer spec, rotary positions in the built model."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from wlb_megatron.attention.core_attention import PlannedRotaryEmbedding, WlbCoreAttention, wlb_core_attention
from wlb_megatron.config import WlbConfig
from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.plugin.model.delta_nets import begin_at_documents, is_delta_net
from wlb_megatron.refusals import RefusedHere


def with_wlb_attention(spec: Any) -> Any:
    """The same layer (or block) spec with the plugin's core attention in place of Megatron's.

    A layer without one is refused, not left as it is, unless it is a gated delta net, or nothing stands in its
    attention's place, or a linear layer (heterogeneous models), where tokens do not meet. Of a HybridModel's stack, a
    copy: releases have one for all.
    """
    attention = getattr(getattr(spec, "submodules", None), "attention_layer", None)
    if attention is not None:
        attention = with_wlb_attention(copy.deepcopy(attention))
        return replace(spec, submodules=replace(spec.submodules, attention_layer=attention))
    layers = spec.layer_specs if hasattr(spec, "layer_specs") else [spec]
    for layer in layers:
        attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
        if getattr(getattr(attention, "module", None), "__name__", "") in WITHOUT_CORE_ATTENTION:
            continue
        inner = getattr(attention, "submodules", None)
        if inner is None or not hasattr(inner, "core_attention"):
            raise RefusedHere(
                f"wlb_megatron found no core_attention in the layer spec {getattr(layer, 'module', layer)}: "
                "use a GPT layer spec with self-attention."
            )
        inner.core_attention = wlb_core_attention(inner.core_attention)
    return spec


WITHOUT_CORE_ATTENTION = (
    "IdentityOp",
    "GatedDeltaNet",  # begun anew at each document (delta_nets.py)
    "ColumnParallelLinearGathered",
    "TELayerNormColumnParallelLinearGathered",
)
"""Modules in the place of a layer's self-attention that may be without it."""


def install_spec(model_config: Any, settings: WlbConfig) -> None:
    """Have what Megatron's model builder builds next built with the plugin's attention, and checked."""
    building = part(Building)
    building.now = True

    def prepare(chunks: list[Any]) -> list[Any]:
        building.now = False
        return prepare_model(chunks, settings)

    model_config.pre_wrap_hooks.append(prepare)


def with_plan_attention(model_provider: Callable[..., Any], settings: WlbConfig) -> Callable[..., Any]:
    """A script's own model provider whose models are built with the plugin's attention, and checked."""

    def provider(*args: Any, **kwargs: Any) -> Any:
        building = part(Building)
        building.now = True
        try:
            model = model_provider(*args, **kwargs)
        finally:
            building.now = False
        return prepare_model([model], settings)[0]

    return provider


@dataclass(slots=True)
class Building:
    """now: models that are built get the plugin's attention."""

    now: bool = False


def wrap_model(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """__init__ of GPTModel or HybridModel that gives the plugin's core attention to what a script's provider builds.

    GPTModel's layers of multi-token prediction, whose specs Megatron makes anew, get the attention that the others
    have. HybridModel makes its own of the same stack.
    """
    signature = inspect.signature(original)
    (name,) = {"hybrid_stack_spec", "transformer_layer_spec"} & {*signature.parameters}
    bound = signature.bind(self, *args, **kwargs)
    if part(Building).now:
        bound.arguments[name] = with_wlb_attention(bound.arguments[name])
        further = bound.arguments.get("mtp_block_spec")
        for layer in () if further is None else further.layer_specs:
            with_wlb_attention(layer.submodules.mtp_model_layer)
    original(*bound.args, **bound.kwargs)


def prepare_model(chunks: list[Any], settings: WlbConfig) -> list[Any]:
    """Check every layer of the built model, and give its attention rotary positions from the plan."""
    from megatron.core.transformer.attention import Attention

    for chunk in chunks:
        for name, module in chunk.named_modules():
            if is_delta_net(module):
                begin_at_documents(module)
            elif _carries_state(module):
                raise RefusedHere(
                    f"wlb_megatron: {name} is a {type(module).__name__}, which would carry state from one document to "
                    "the next: build the model of attention, gated delta nets, MLP and experts"
                )
            if not isinstance(module, Attention):
                continue
            if not isinstance(module.core_attention, WlbCoreAttention):
                raise RefusedHere(  # other pipeline stages have other layers
                    f"wlb_megatron: {name} was built with {type(module.core_attention).__name__}: "
                    "something replaced the layer spec after the plugin (--spec, --attention-backend local?)."
                )
            module.core_attention.keep_keys = not settings.regather_keys
            module.core_attention.asked_kernels = settings.kernels
            _ = module.core_attention.kernels  # chosen now, and printed; or refused
        plan_positions(chunk)
        chunk.config.variable_seq_lengths = True  # where allgather had it left out; the plan gives the shapes
        # Megatron waits for the device after each transfer, because of a race that PyTorch mended in 1.13 (its pull
        # request 82450): streams order transfers. Without the wait the host launches ahead. A ring exchange keeps it:
        # that gives Megatron no request, so nothing else waits.
        if not chunk.config.use_ring_exchange_p2p:
            chunk.config.batch_p2p_sync = False
    return chunks


def _carries_state(module: Any) -> bool:
    """Whether it is of a class of megatron.core.ssm, as Mamba is. HybridModel's MLP is there too."""
    names = {kind.__module__ for kind in type(module).__mro__} - {"megatron.core.ssm.mlp_layer"}
    return any(name.startswith("megatron.core.ssm.") for name in names)


def plan_positions(model: Any) -> None:
    """Rotary frequencies at the plan's positions: the model's own, and those of MLA, which rotates in each layer."""
    from megatron.core.transformer.attention import Attention

    plain = type(getattr(model, "rotary_pos_emb", None)).__name__ == "RotaryEmbedding"
    if getattr(model, "rotary_pos_emb", None) is not None:
        model.rotary_pos_emb = PlannedRotaryEmbedding(model.rotary_pos_emb)
    latent = None  # one for all layers: their frequencies are the same, and then made once a micro-batch
    for module in list(model.modules()):
        if not isinstance(module, Attention):
            continue
        if plain and _splits_plainly(module):
            base: Any = type(module)
            module.__class__ = _rotating(base)
        if getattr(module, "rotary_pos_emb", None) is not None:
            # Megatron's dev branch drops the batch dimension only of its own packed format, which is not the plan's.
            drops_batch = "if thd_packed_seq:" not in inspect.getsource(module.get_query_key_value_tensors)
            latent = latent or PlannedRotaryEmbedding(module.rotary_pos_emb, drops_batch)
            module.rotary_pos_emb = latent


class RotatingAttention:
    """Mixin before Megatron's SelfAttention: one kernel splits the projections and rotates queries and keys, each way.

    Megatron does so itself (fused_single_qkv_rope), but not with packed_seq_params. The kernel is Transformer Engine's
    and computes as its kernel of a rotation alone, so results are the same. A layer has four launches fewer.
    """

    config: Any
    _frequencies: Any = None

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        width = self.num_attention_heads_per_partition + 2 * self.num_query_groups_per_partition  # type: ignore[attr-defined]
        width *= self.hidden_size_per_attention_head  # type: ignore[attr-defined]
        # The kernel counts elements in int32. Without frequencies Megatron rotates nothing.
        fits = rotary_pos_emb is not None and len(rotary_pos_emb) * width < 2**31
        self._frequencies = rotary_pos_emb if fits else None
        rest = None if fits else rotary_pos_emb
        return super().forward(*args, rotary_pos_emb=rest, **kwargs)  # type: ignore[misc]

    def get_query_key_value_tensors(self, *args: Any, split_qkv: bool = True, **kwargs: Any) -> Any:
        from megatron.core.transformer import attention

        split, found = super().get_query_key_value_tensors, self._frequencies  # type: ignore[misc]
        if found is None:
            return split(*args, split_qkv=split_qkv, **kwargs)
        mixed, widths = split(*args, split_qkv=False, **kwargs)
        interleaved = self.config.rotary_interleaved
        return attention.apply_fused_qkv_rotary_pos_emb(mixed, found, found, widths, interleaved=interleaved)


@functools.cache
def _rotating(base: Any) -> type:
    return type(base.__name__, (RotatingAttention, base), {"__doc__": RotatingAttention.__doc__})


def _splits_plainly(module: Any) -> bool:
    """Whether nothing comes between the projections of an attention and Transformer Engine's rotation."""
    from megatron.core.transformer import attention
    from megatron.core.transformer.identity_op import IdentityOp

    config = module.config
    return (
        attention.HAVE_FUSED_QKV_ROPE
        and config.apply_rope_fusion
        and isinstance(module, attention.SelfAttention)
        and all(isinstance(norm, IdentityOp | None) for norm in (module.q_layernorm, module.k_layernorm))
        and not (config.attention_output_gate or getattr(config, "head_wise_attn_gate", False))
        and not (config.no_rope_freq and config.no_rope_freq[module.layer_number - 1])
        and not config.test_mode
        and module.world_size <= config.num_query_groups
    )
