"""Attention sinks: one more logit per head in the softmax's denominator, without a value (gpt-oss; 0 is "off by
one").

Let lse be the log of the denominator over keys. With a sink the denominator is exp(lse) + exp(sink), so the output
shrinks by exp(lse - logaddexp(lse, sink)). So the sink is applied once, to the output of all keys, and kernels need
not know about it. Given the new output and log-sum-exp, the kernels' backward is that of the softmax with the sink.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log of the denominator with a sink.

    out: [rows, heads, dim]; lse: [rows, heads], fp32 or more, over all keys; sink: [heads].
    """
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype))
    return (out * torch.exp(lse - with_sink)[..., None]).to(out.dtype), with_sink


def sink_gradient(out: Tensor, lse: Tensor, dout: Tensor, sink: Tensor) -> Tensor:
    """[heads]: the sink's gradient, from what apply_sink returned.

    The sink's share p of a row has gradient p * (0 - sum(out * dout)).
    """
    pulled = torch.einsum("thd,thd->th", out.to(lse.dtype), dout.to(lse.dtype))
    return -(torch.exp(sink.to(lse.dtype) - lse) * pulled).sum(0).to(sink.dtype)
