"""The CPU backend: plain torch attention, sequence by sequence, for any dtype and device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wlb_megatron.attention.kernels.row_sums import KV, apart, empty_like
from wlb_megatron.sharding.attention_calls import AttentionCall


class TorchKernels:
    """sharded_attention.Kernels with an explicit softmax. Computes the scores of one sequence at a time."""

    separate = True

    def takes(self, dim: int, v_dim: int) -> bool:
        return True

    def buffer_rows(self, call: AttentionCall) -> tuple[int, int]:
        return call.q_rows, call.kv_rows

    def forward(self, call: AttentionCall, q: Tensor, kv: KV, scale: float) -> tuple[Tensor, Tensor]:
        k, v = apart(kv, q.shape[-1])
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        lse = q.new_empty(q.shape[:2], dtype=_wide(q))
        for rows, keys in _sequences(call):
            scores = _scores(call, q[rows], k[keys], scale)
            lse[rows] = torch.logsumexp(scores, -1).flatten(0, 1).T
            values = v[keys].to(scores.dtype)
            out[rows] = _flat(torch.einsum("ghqk,kgd->qghd", torch.softmax(scores, -1), values)).to(q.dtype)
        return out, lse

    def backward(
        self, call: AttentionCall, q: Tensor, kv: KV, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, KV]:
        dq, dkv = torch.empty_like(q), empty_like(kv)
        (k, v), (dk, dv) = apart(kv, q.shape[-1]), apart(dkv, q.shape[-1])
        groups = k.shape[1]
        # D of FlashAttention-2 (arXiv 2307.08691, algorithm 2): what softmax's gradient subtracts from dP.
        delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)
        for rows, key_rows in _sequences(call):
            scores = _scores(call, q[rows], k[key_rows], scale)
            grouped_lse, grouped_delta = (_group(x[rows], groups).permute(1, 2, 0) for x in (lse, delta))
            probs = torch.exp(scores - grouped_lse.unsqueeze(-1))
            keys, values = (x[key_rows].to(scores.dtype) for x in (k, v))
            queries, grads = (_group(x[rows].to(scores.dtype), groups) for x in (q, dout))
            dscores = torch.einsum("qghd,kgd->ghqk", grads, values) - grouped_delta.unsqueeze(-1)
            dscores = dscores * probs * scale
            dq[rows] = _flat(torch.einsum("ghqk,kgd->qghd", dscores, keys)).to(q.dtype)
            dk[key_rows] = torch.einsum("ghqk,qghd->kgd", dscores, queries).to(q.dtype)
            dv[key_rows] = torch.einsum("ghqk,qghd->kgd", probs, grads).to(q.dtype)
        return dq, dkv


def _sequences(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    row = key = 0
    for queries, keys in call.sizes:
        yield slice(row, row + queries), slice(key, key + keys)
        row, key = row + queries, key + keys


def _scores(call: AttentionCall, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[kv heads, heads per kv head, queries, keys], masked."""
    wide_dtype = _wide(q)
    scores = torch.einsum("qghd,kgd->ghqk", _group(q, k.shape[1]).to(wide_dtype), k.to(wide_dtype)) * scale
    if not call.causal:
        return scores
    queries, keys = scores.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1 + keys - queries)
    if call.window is not None:
        hidden |= torch.ones_like(hidden).tril(keys - queries - call.window - 1)
    return scores.masked_fill_(hidden, float("-inf"))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _group(x: Tensor, groups: int) -> Tensor:
    """[t, heads, ...] as [t, groups, heads per group, ...]: head h reads kv head h // (heads / groups)."""
    return x.unflatten(1, (groups, -1))


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1, 2)
