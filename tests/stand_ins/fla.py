"""flash-linear-attention's functions of a gated delta net in plain torch, one document at a time, a token at a time.

Megatron imports them by the names of that package's modules, and builds no gated delta net without them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

for name in ("modules", "modules.convolution", "modules.l2norm", "ops", "ops.cp", "ops.gated_delta_rule"):
    sys.modules[f"fla.{name}"] = sys.modules[__name__]

build_cp_context = causal_conv1d_update = fused_recurrent_gated_delta_rule = (
    None  # of inference, and other modes
)


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in a wrapper, as the package's own are."""
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


def _by_document(function: Callable[..., Tensor], cu_seqlens: Tensor | None, *rows: Tensor) -> Tensor:
    """The function's results over [1, tokens, ..] of each document, end to end."""
    if cu_seqlens is None:
        return function(*rows)
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(tensor.split(lengths, dim=1) for tensor in rows), strict=True)
    return torch.cat([function(*part) for part in parts], dim=1)


@_guarded
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, cu_seqlens: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Convolution of each channel, and SiLU. x: [1, tokens, channels]; weight: [channels, width]."""
    width = weight.shape[1]

    def convolve(rows: Tensor) -> Tensor:
        padded = F.pad(rows.transpose(1, 2), (width - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2)

    return _by_document(convolve, cu_seqlens, x), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Rows of x over their length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


@_guarded
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """The rule S = exp(g) S, S += beta k (v - S k), in fp32, and its outputs S q.

    Args:
        q: [1, tokens, heads, key channels].
        k: As q.
        v: [1, tokens, heads, value channels].
        g: The logarithm of the decay, [1, tokens, heads].
        beta: How much of a value is written, as g.
        cu_seqlens: Where documents begin and end, None for one document.
    """

    def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        state, rows = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
        for query, key, value, decay, written_share in zip(
            *(tensor.unbind(1) for tensor in (q, k, v, g.exp(), beta)), strict=True
        ):
            state = state * decay[..., None, None]
            change = (value - torch.einsum("bhkv,bhk->bhv", state, key)) * written_share[..., None]
            state = state + key[..., None] * change[..., None, :]
            rows.append(torch.einsum("bhkv,bhk->bhv", state, query))
        return torch.stack(rows, dim=1)

    wide_tensors = (tensor.float() for tensor in (q * q.shape[-1] ** -0.5, k, v, g, beta))
    return _by_document(recur, cu_seqlens, *wide_tensors).to(v.dtype), None
