"""The parts of a step, of one tensor-parallel rank's shape: Megatron's own layer, and the model's ends in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels.before_training import device_call
from wlb_megatron.attention.sharded_attention import Kernels, sharded_attention
from wlb_megatron.errors import WlbError
from wlb_megatron.profiler.points import Point
from wlb_megatron.sharding.attention_calls import AttentionLayout, attention_layout, exchange_part
from wlb_megatron.workload.profile import ProfiledModel

Part = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Forward, and the backward of its result."""


class _Pass(torch.autograd.Function):
    """Replaces attention: queries pass through, keys and values get zero gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.like = k
        return q.flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k = ctx.like
        return grad.unflatten(-1, (-1, k.shape[-1])), torch.zeros_like(k), torch.zeros_like(k)


class NoAttention(nn.Module):
    """Megatron's core attention without the attention, whose time is measured separately."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return _Pass.apply(query, key, value)


def keep_gradients(module: nn.Module) -> nn.Module:
    """Adds gradients to fp32 main_grad and drops them, as Megatron's data parallelism does."""

    def add(parameter: Any) -> None:
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        parameter.grad_added_to_main_grad = False

    for parameter in module.parameters():
        weight: Any = parameter
        weight.data.normal_(0, 0.02)
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(add)
    return module


def layer_step(layer: nn.Module, model: ProfiledModel, tokens: int, like: Tensor) -> Part:
    """A layer on [tokens, 1, hidden], with the gradient of its input."""
    x = torch.randn(tokens, 1, model.hidden, device=like.device, dtype=like.dtype).requires_grad_()
    grad = torch.randn_like(x)
    angles = torch.rand(tokens, 1, 1, model.head_dim, device=like.device)

    def forward() -> Tensor:
        x.grad = None
        return layer(x, angles)

    return forward, lambda y: y.backward(grad)


class Ends(nn.Module):
    """Embedding of the first stage, final norm and output of the last."""

    def __init__(self, model: ProfiledModel) -> None:
        super().__init__()
        rows = -(-model.vocab // model.tp)
        self.embedding = nn.Embedding(rows, model.hidden)
        self.norm = nn.RMSNorm(model.hidden)
        self.output = nn.Linear(model.hidden, rows, bias=False)


def embedding_step(ends: Ends, model: ProfiledModel, tokens: int, like: Tensor) -> Part:
    rows = ends.embedding.weight.shape[0]
    ids = torch.randint(rows, (1, tokens), device=like.device)
    grad = torch.randn(tokens, 1, model.hidden, device=like.device, dtype=like.dtype)
    return (lambda: ends.embedding(ids).transpose(0, 1).contiguous()), lambda y: y.backward(grad)


def loss_step(ends: Ends, model: ProfiledModel, tokens: int, like: Tensor) -> Part:
    x = torch.randn(tokens, 1, model.hidden, device=like.device, dtype=like.dtype).requires_grad_()
    rows = ends.output.weight.shape[0]
    labels = torch.randint(rows, (tokens, 1), device=like.device)
    mask = torch.ones(tokens, device=like.device)

    def forward() -> Tensor:
        x.grad = None
        losses = vocab_parallel_cross_entropy(ends.output(ends.norm(x)), labels)
        return (losses.flatten() * mask).sum()

    return forward, lambda y: y.backward()


def optimizer_step(layer: nn.Module) -> Part:
    """The optimizer as a step of two parts.

    Forward: gradient norm, clipping and Adam on fp32 copies of a layer's weights. Backward: the copy back to the
    model's weights and the clearing of gradients.
    """
    weights = list(layer.parameters())
    main = [nn.Parameter(w.detach().float()) for w in weights]
    for copy in main:
        copy.grad = torch.full_like(copy, 1e-3)
    gradients = [copy.grad for copy in main if copy.grad is not None]
    targets: list[Any] = weights
    adam = _adam(main)

    def forward() -> None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        adam.step()

    def backward(_: None) -> None:
        with torch.no_grad():
            torch._foreach_copy_(targets, list[Tensor](main))
            for weight in targets:
                weight.main_grad.zero_()

    return forward, backward


def _adam(main: list[nn.Parameter]) -> Any:
    if main[0].is_cuda:
        from transformer_engine.pytorch.optimizers import FusedAdam

        return FusedAdam(main)
    return torch.optim.Adam(main, fused=True)


class AttentionBench:
    """Steps of one model's attention on one device."""

    def __init__(
        self, model: ProfiledModel, kernels: Kernels, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model, self.kernels, self.device, self.dtype = model, kernels, device, dtype
        self.scale = model.head_dim**-0.5

    def step(self, point: Point) -> Part:
        return self._share(point) if point.plan is not None else self._call(point)

    def _call(self, point: Point) -> Part:
        """One kernel call, causal over diagonals or bottom-right ones, or without mask over rectangles."""
        diagonals, masked = point.sizes["diagonals"], point.sizes.get("bottom_right", [])
        shapes = [(q, q, n) for q, n in diagonals] or masked or point.sizes["rectangles"]
        sizes = [(q, k) for q, k, n in shapes for _ in range(n)]
        causal, same_rows = bool(diagonals or masked), bool(diagonals)
        call = device_call(sizes, self.device, causal=causal, same_rows=same_rows)
        q, dout = self._random(2, call.q_rows, self.model.rank_heads)
        (kv,) = self._random(1, call.kv_rows, 2, self.model.rank_kv_heads)

        def forward() -> tuple[Tensor, Tensor]:
            return self.kernels.forward(call, q, kv, self.scale)

        def backward(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            out, lse = results
            return self.kernels.backward(call, q, kv, out, lse, dout, self.scale)

        return forward, backward

    def _share(self, point: Point) -> Part:
        """A rank's whole attention. Keys that other ranks hold are taken from its own, so nothing travels."""
        assert point.plan is not None
        layout = device_layout(_alone(attention_layout(point.plan, point.rank)), self.device)
        q, dout = (
            x.requires_grad_(number == 0)
            for number, x in enumerate(self._random(2, layout.tokens, self.model.rank_heads))
        )
        k, v = (x.requires_grad_() for x in self._random(2, layout.tokens, self.model.rank_kv_heads))

        def forward() -> Tensor:
            return sharded_attention(q, k, v, layout, None, self.kernels, self.scale)

        return forward, lambda out: torch.autograd.grad(out, (q, k, v), dout)

    def _random(self, count: int, rows: int, *axes: int) -> list[Tensor]:
        shape = (rows, *axes, self.model.head_dim)
        return [torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(count)]


def _alone(layout: AttentionLayout) -> AttentionLayout:
    """The layout with an exchange within the rank: all keys that it needs are some of its own."""
    exchange = layout.exchange
    assert exchange is not None
    place = np.where(exchange.place < 0, ~exchange.place % layout.tokens, exchange.place)
    inward = exchange_part(0, [place[:0]], (0,), place, [layout.tokens], remote=False, used=len(place) > 0)
    return replace(layout, exchange=inward)


def megatron_layer(model: ProfiledModel, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A layer of one tensor-parallel rank's shape, called with [t, 1, hidden] and rotary angles.

    On a GPU it is of Transformer Engine's modules, on a CPU of Megatron's own. Without sequence parallelism's split of
    norms and residuals. With experts a router spreads t tokens over this rank's experts, as many rows as all
    expert-parallel ranks send them in mean. WlbError where this Megatron cannot build it.
    """
    on_gpu = device.type == "cuda"
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    if on_gpu:
        model_parallel_cuda_manual_seed(1)
    try:
        layer = _built(model, dtype, on_gpu)
    except (ImportError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
        raise WlbError(
            f"Megatron's layer cannot be built ({str(error).partition(chr(10))[0]}): run wlb-megatron doctor for "
            "versions that work"
        ) from None
    if model.experts is not None and model.experts.tensor < model.tp:
        layer.mlp = _Part(layer.mlp, model.tp // model.experts.tensor)
    return _Layer(keep_gradients(layer))


def _built(model: ProfiledModel, dtype: torch.dtype, on_gpu: bool) -> Any:
    """Megatron's layer, with its fused kernels on a GPU."""
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
        bias_activation_fusion=on_gpu
        and (model.gated or model.experts is None),  # experts have no other fused activation
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=on_gpu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=on_gpu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=on_gpu and model.fused,
        use_cpu_initialization=not on_gpu,
    )
    experts = model.rank_experts or None
    if on_gpu:
        spec = get_gpt_layer_with_transformer_engine_spec(experts, moe_grouped_gemm=True)
    else:
        spec = get_gpt_layer_local_spec(experts, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = NoAttention
    layer = build_module(spec, config=config)
    return layer.cuda() if on_gpu else layer


def leave() -> None:
    """Ends the process groups of the layer, so that this process can build another."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


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
