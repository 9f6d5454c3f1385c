"""The executor of every shard plan: attention of one rank's tokens to their documents' keys on all ranks.

One autograd function wraps both kernel calls of a layer. Forward: the exchange of keys starts, the diagonals run on
local keys, then the rectangles run on the exchanged keys, and log-sum-exp merges the two. Backward: each call
computes its exact share of the gradient from the merged output and log-sum-exp. The gradients of exchanged keys
travel back while the diagonals run if the plan has ranks in step, else after them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from wlb_megatron.attention.kernels.row_sums import (
    KV,
    add_rows,
    grads_apart,
    merge_rows,
    side_by_side,
    spread_four,
    spread_rows,
    sum_pairs,
)
from wlb_megatron.attention.kv_exchange import KeyCache, add_returned, start_gather, start_return
from wlb_megatron.sharding.attention_calls import AttentionCall, AttentionLayout, WindowLayout


class Kernels(Protocol):
    """The interface of a backend: plain variable-length attention in which every row belongs to a sequence.

    q: [rows, heads, dim]. out, dout: [rows, heads, v dim]. lse: [rows, heads], the log of the softmax denominator.
    kv: one row per key, as row_sums.side_by_side makes them, or keys and values if `separate`; dkv has its form. All
    are contiguous except lse, which may be stored by heads.
    """

    separate: bool
    """Whether kv may be a pair, as saves a copy each way where keys stay on their rank."""

    def takes(self, dim: int, v_dim: int) -> bool:
        """Whether values may be narrower than keys at these sizes; if not, they are padded with zeros."""

    def buffer_rows(self, call: AttentionCall) -> tuple[int, int]:
        """Rows of the buffers for the call's queries and keys. Rows beyond the call's own are never read."""

    def forward(self, call: AttentionCall, q: Tensor, kv: KV, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""

    def backward(
        self, call: AttentionCall, q: Tensor, kv: KV, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, KV]:
        """dq and dkv for these keys, given out and lse of the softmax over all keys."""


class LayerSettings(NamedTuple):
    """What a layer may have beside its kernels.

    Args:
        keep_keys: Save the exchanged keys for backward, else exchange them again.
        sink: [heads], see apply_sink.
        windowed: The layer uses the layout's window.
        cache: The layer's, if documents come in chunks.
    """

    keep_keys: bool = True
    sink: Tensor | None = None
    windowed: bool = False
    cache: KeyCache | None = None


_USUAL = LayerSettings()


def sharded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    group: Any,
    kernels: Kernels,
    scale: float,
    settings: LayerSettings = _USUAL,
) -> Tensor:
    """Attention of the rank's own tokens.

    q: [t, heads, dim]; k: [t, kv heads, dim]; v: [t, kv heads, v dim]. Returns [t, heads, v dim]. With Megatron's
    inputs [t, 1, ..] it returns [t, 1, heads * v dim], which saves five autograd nodes of views.

    group: the context-parallel process group. Raises ValueError if shapes do not fit the layout.
    """
    if q.shape[0] != layout.tokens or k.shape[0] != layout.tokens:
        raise ValueError(
            f"attention was given {q.shape[0]} queries and {k.shape[0]} keys, but the micro-batch's plan gives "
            f"this rank {layout.tokens} tokens: plan and data do not belong together"
        )
    keep_keys, sink, windowed, cache = settings
    dim, v_dim = q.shape[-1], v.shape[-1]
    pad = v_dim != dim and not kernels.takes(dim, v_dim)
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != dim or v_dim > dim:
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} must have one head dim, "
            "values at most that"
        )
    if windowed and layout.window is None:
        raise ValueError(
            "a windowed layer needs a layout with a window: make it with the model's window size"
        )
    if pad:
        v = torch.nn.functional.pad(v, (0, dim - v_dim))
    one_call = layout.window if windowed else layout.single
    function: Any = _ShardedAttention if one_call is None else _OneCall
    call_layout = one_call or layout
    if call_layout.cache is not None:
        if cache is None:
            raise ValueError("a micro-batch that shares a document with another needs the layer's cache")
        keep_keys = cache.start(call_layout.cache) and keep_keys
    out = function.apply(q, k, v, sink, call_layout, group, kernels, scale, keep_keys, cache)
    if not pad:
        return out
    return out[..., :v_dim] if q.dim() == 3 else out.unflatten(2, (-1, dim))[..., :v_dim].flatten(2)


class _Attention(torch.autograd.Function):
    """The common part of both forms (inputs made contiguous, the sink, what is saved). They differ in `attend` and
    `pull`.
    """

    keys_serve = False
    """Whether backward needs only the exchanged keys, if they are kept."""

    @classmethod
    def forward(cls, ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, sink, ctx.layout, ctx.group, ctx.kernels, ctx.scale, keep_keys, ctx.cache = inputs
        ctx.flat = q.dim() == 4
        q, k, v = [x.squeeze(1) if ctx.flat else x.detach() for x in (q, k, v)]
        q, local = q.contiguous(), ctx.kernels.separate and not (ctx.layout.exchange or ctx.layout.cache)
        # Others may be views, which would keep all projections in memory until backward.
        separate = local and k.is_contiguous() and v.is_contiguous()
        kv: Any = (k, v) if separate else side_by_side(k, v)
        if ctx.layout.cache:
            ctx.cache.keep(ctx.layout.cache, kv)
        out, lse, keys = cls.attend(ctx, q, kv)
        if sink is not None:
            out, lse = apply_sink(out, lse, sink)
        keys = keys if keep_keys else None
        saved_kv = kv if separate else (None if keys is not None and cls.keys_serve else kv,)
        ctx.save_for_backward(q, keys, out, lse, sink, *saved_kv)
        return out.view(out.shape[0], 1, -1) if ctx.flat else out

    @classmethod
    def backward(cls, ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, out, lse, sink, *saved_kv = ctx.saved_tensors
        kv = tuple(saved_kv) if len(saved_kv) == 2 else saved_kv[0]
        dout = dout.contiguous()
        if ctx.flat:
            dout = dout.view(out.shape)
        dq, dk, dv = cls.pull(ctx, q, kv, keys, out, lse, dout)
        dsink = None if sink is None else sink_gradient(out, lse, dout, sink)
        if ctx.flat:
            dq, dk, dv = dq.unsqueeze(1), dk.unsqueeze(1), dv.unsqueeze(1)
        return dq, dk, dv, dsink, None, None, None, None, None, None

    @classmethod
    def attend(cls, ctx: Any, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns output, log-sum-exp and exchanged keys."""
        raise NotImplementedError  # abstract: the two subclasses below implement it

    @classmethod
    def pull(cls, ctx: Any, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv from q, kv (None: exchanged keys suffice), exchanged keys (None: not kept), out, lse, dout."""
        raise NotImplementedError  # abstract, as `attend`


class _ShardedAttention(_Attention):
    @classmethod
    def attend(cls, ctx: Any, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        layout, kernels, scale = ctx.layout, ctx.kernels, ctx.scale
        finish = start_gather(layout.exchange, _rows_to_send(ctx, kv), ctx.group) if layout.exchange else None
        out, lse = kernels.forward(layout.diagonals, q, kv, scale)
        earlier_keys = finish(_key_rows(layout, kernels)) if finish else None
        if call := layout.rectangles:
            queries = spread_rows(q, layout.query_rows, kernels.buffer_rows(call)[0])
            part, part_lse = kernels.forward(call, queries, earlier_keys, scale)
            lse = lse.contiguous()
            merge_rows(out, lse, part, part_lse.contiguous(), layout.queries)
        return out, lse, earlier_keys

    @classmethod
    def pull(cls, ctx: Any, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, kv, earlier_keys, out, lse, dout = saved
        layout, group, kernels, scale = ctx.layout, ctx.group, ctx.kernels, ctx.scale

        def diagonals() -> tuple[Tensor, Tensor]:
            return kernels.backward(layout.diagonals, q, kv, out, lse, dout, scale)

        if layout.exchange is None:
            dq, dkv = diagonals()
            return dq, *_apart(ctx, dkv, q)
        gradients = None
        if earlier_keys is None:  # keys are exchanged again, hidden by the diagonals
            finish = start_gather(layout.exchange, _rows_to_send(ctx, kv), group)
            gradients = diagonals()
            earlier_keys = finish(_key_rows(layout, kernels))
        dq_part, dearlier = None, earlier_keys
        if call := layout.rectangles:
            rows, _ = kernels.buffer_rows(call)
            queries, *picked = spread_four((q, out, lse, dout), layout.query_rows, rows)
            dq_part, dearlier = kernels.backward(call, queries, earlier_keys, *picked, scale)
        if gradients is None and not layout.hide_return:
            gradients = diagonals()
        come_back = start_return(layout.exchange, dearlier, group)
        dq, dkv = gradients or diagonals()
        if dq_part is not None:
            add_rows(dq, dq_part, layout.queries)
        add_returned(layout.exchange, dearlier, come_back(), dkv, *_cached_gradients(ctx))
        return dq, *_apart(ctx, dkv, q)


def _rows_to_send(ctx: Any, kv: Tensor) -> Tensor:
    """All keys that the rank holds: its own, and those it kept in earlier micro-batches."""
    return ctx.cache.take(ctx.layout.cache, kv) if ctx.layout.cache else kv


def _cached_gradients(ctx: Any) -> list[Tensor]:
    return ctx.cache.gradients(ctx.layout.cache) if ctx.layout.cache else []


def _key_rows(layout: AttentionLayout, kernels: Kernels) -> int:
    """Rows of the buffer of earlier keys; 0 on a rank that only sends keys."""
    return kernels.buffer_rows(layout.rectangles)[1] if layout.rectangles else 0


class _OneCall(_Attention):
    """One call on a buffer of each segment's keys, its own included. So dkv is the sum of its rows."""

    keys_serve = True

    @classmethod
    def attend(cls, ctx: Any, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        layout: WindowLayout = ctx.layout
        keys = _all_keys(ctx, kv) if layout.exchange else None
        out, lse = ctx.kernels.forward(layout.call, q, kv if keys is None else keys, ctx.scale)
        return out, lse, keys

    @classmethod
    def pull(cls, ctx: Any, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, kv, keys, out, lse, dout = saved
        layout: WindowLayout = ctx.layout
        if layout.exchange is None:
            dq, dkv = ctx.kernels.backward(layout.call, q, kv, out, lse, dout, ctx.scale)
            return dq, *_apart(ctx, dkv, q)
        if keys is None:
            keys = _all_keys(ctx, kv)
        dq, dkeys = ctx.kernels.backward(layout.call, q, keys, out, lse, dout, ctx.scale)
        back = start_return(layout.exchange, dkeys, ctx.group, hidden=False)()
        if layout.cache is None and dkeys.dim() == 4:
            return dq, *sum_pairs(dkeys, layout.exchange.returns[0], back)
        dkv = dkeys.new_zeros((len(q), *dkeys.shape[1:]))
        add_returned(layout.exchange, dkeys, back, dkv, *_cached_gradients(ctx))
        return dq, *_apart(ctx, dkv, q)


def _all_keys(ctx: Any, kv: Tensor) -> Tensor:
    """The buffer of each segment's keys, exchanged."""
    layout: WindowLayout = ctx.layout
    assert layout.exchange is not None
    gather = start_gather(layout.exchange, _rows_to_send(ctx, kv), ctx.group, hidden=False)
    return gather(ctx.kernels.buffer_rows(layout.call)[1])


def _apart(ctx: Any, dkv: KV, q: Tensor) -> tuple[Tensor, Tensor]:
    """dk and dv, plus what later micro-batches returned."""
    if ctx.layout.cache:
        ctx.cache.finish(ctx.layout.cache, dkv)
    return grads_apart(dkv, q.shape[-1])


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log of the denominator with a sink.

    A sink is one more logit per head in the denominator, without a value (gpt-oss; 0 is "off by one"). Let lse be the
    log of the denominator over keys. With a sink the denominator is exp(lse) + exp(sink), so the output shrinks by
    exp(lse - logaddexp(lse, sink)). So the sink is applied once, to the output of all keys, and kernels need not know
    about it. Given the new output and log-sum-exp, the kernels' backward is that of the softmax with the sink.

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
