"""What a step of a small GPT with experts must give, in plain torch and fp64, one document at a time.

Only the names and layouts of the weights are Megatron's, which its checkpoints hold, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the model: one layer, every token to `topk` of `experts`."""

    vocabulary: int = 64
    hidden: int = 32
    heads: int = 4
    ffn: int = 48
    experts: int = 4
    topk: int = 2
    base: float = 10000.0


def loss_of(
    weights: Mapping[str, Tensor],
    micro_batches: Sequence[Sequence[Tensor]],
    shape: Shape,
    aux: float,
    z: float,
) -> tuple[Tensor, int]:
    """The step's loss, a mean over its predictions, and how many these are.

    micro_batches: each one's documents, int64[n] token ids. aux, z: coefficients of the routers' losses, each a mean
    over a micro-batch, which weighs by its tokens.
    """
    total, predictions = torch.zeros((), dtype=torch.float64), 0
    for documents in micro_batches:
        tokens, logits = sum(map(len, documents)), []
        for ids in documents:
            hidden, routed = _layer(weights, ids, shape)
            logits.append(routed)
            scores = (
                _norm(hidden, weights["decoder.final_layernorm.weight"]) @ weights["output_layer.weight"].T
            )
            total = total + functional.cross_entropy(scores[:-1], ids[1:], reduction="sum")
            predictions += len(ids) - 1
        routed = torch.cat(logits)
        routes = torch.zeros_like(routed).scatter(1, routed.topk(shape.topk).indices, 1.0)
        shares = routes.mean(0) / shape.topk * routed.softmax(-1).mean(0)
        total = total + tokens * aux * shape.experts * shares.sum()
        total = total + tokens * z * routed.logsumexp(-1).square().mean()
    return total / predictions, predictions


def _layer(weights: Mapping[str, Tensor], ids: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """[n, hidden] of one document, and its router's logits."""
    layer = {
        name.removeprefix("decoder.layers.0."): weight
        for name, weight in weights.items()
        if name.startswith("decoder.layers.0.")
    }
    hidden = weights["embedding.word_embeddings.weight"][ids]
    normed = _norm(hidden, layer["input_layernorm.weight"])
    # Query, key and value of a head lie beside each other.
    qkv = (normed @ layer["self_attention.linear_qkv.weight"].T).view(len(ids), shape.heads, 3, -1)
    query, key, value = (part.transpose(0, 1) for part in qkv.unbind(2))
    query, key = _rotated(query, shape.base), _rotated(key, shape.base)
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + out.transpose(0, 1).flatten(1) @ layer["self_attention.linear_proj.weight"].T
    normed = _norm(hidden, layer["pre_mlp_layernorm.weight"])
    logits = normed @ layer["mlp.router.weight"].T
    top = logits.topk(shape.topk)
    shares = torch.zeros_like(logits).scatter(1, top.indices, top.values.softmax(-1))
    for number in range(shape.experts):
        expert = f"mlp.experts.local_experts.{number}"
        gate, up = (normed @ layer[f"{expert}.linear_fc1.weight"].T).chunk(2, -1)
        answer = (functional.silu(gate) * up) @ layer[f"{expert}.linear_fc2.weight"].T
        hidden = hidden + shares[:, number, None] * answer
    return hidden, logits


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _rotated(x: Tensor, base: float) -> Tensor:
    """[heads, n, channels] at positions 0 .. n - 1, halves of the channels rotated together."""
    channels = x.shape[-1]
    speeds = base ** (-torch.arange(0, channels, 2, dtype=x.dtype) / channels)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * speeds
    angles = torch.cat([angles, angles], -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
