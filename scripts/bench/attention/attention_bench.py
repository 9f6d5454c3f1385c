"""What the attention benchmark measures with: inputs, an fp32 reference, Transformer Engine's own, clocks, tables."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import Tensor

from wlb_megatron.attention.kernels import kernel_choice
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.sharding.slots import padding

HEADS, KV_HEADS, DIM = 8, 2, 128
SCALE = DIM**-0.5
Step = Callable[..., list[Tensor]]


class Chosen:
    """The kernels that are measured, cuDNN's until others are named."""

    def __init__(self) -> None:
        self.use("cudnn")

    def use(self, name: str) -> None:
        self.name, self._kernels = name, kernel_choice.kernels(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


KERNELS: Any = Chosen()


def tensors(
    tokens: int,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dim: int = DIM,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> SimpleNamespace:
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn(tokens, heads, dim, generator=generator, device="cuda", dtype=dtype)

    v_dim = v_dim or dim
    return SimpleNamespace(
        q=normal(heads, dim), k=normal(kv_heads, dim), v=normal(kv_heads, v_dim), dout=normal(heads, v_dim)
    )


def reference(lengths: np.ndarray, x: SimpleNamespace) -> list[Tensor]:
    """Output, dq, dk, dv in fp32, a document and 1024 queries at a time: a diagonal and a rectangle, merged."""
    kernels = TorchKernels()
    q, k, v, dout = (t.float() for t in (x.q, x.k, x.v, x.dout))
    kv = torch.stack((k, v), dim=1)
    out, dq, dkv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(kv)
    start = 0
    for length in lengths.tolist():
        for begin in range(start, start + length, 1024):
            end = min(begin + 1024, start + length)
            rows = slice(begin, end)
            parts: list[tuple[slice, Any]] = [
                (rows, SimpleNamespace(causal=True, window=None, sizes=((end - begin, end - begin),)))
            ]
            if begin > start:
                keys = slice(start, begin)
                parts.append((keys, SimpleNamespace(causal=False, sizes=((end - begin, begin - start),))))
            outs, lses = zip(
                *(kernels.forward(c, q[rows], kv[keys], SCALE) for keys, c in parts), strict=True
            )
            lse = torch.logsumexp(torch.stack(lses), 0)
            out[rows] = sum(
                o * torch.exp(partial - lse)[..., None] for o, partial in zip(outs, lses, strict=True)
            )
            dq[rows] = 0
            for keys, call in parts:
                args = (q[rows], kv[keys], out[rows], lse, dout[rows], SCALE)
                dq_part, dkv_part = kernels.backward(call, *args)
                dq[rows] += dq_part
                dkv[keys] += dkv_part
        start += length
    return [out, dq, dkv[:, 0], dkv[:, 1]]


def errors(got: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((a.detach().float() - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]


def leaves(*values: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in values]


def layers_of(attend: Callable[[Tensor], Tensor], inputs: list[Tensor], dout: Tensor) -> Step:
    """A step of n layers, one after the other: attend(q) is the next one's q. Returns out, dq, dk, dv."""

    def step(layers: int = 1) -> list[Tensor]:
        out = inputs[0]
        for _ in range(layers):
            out = attend(out)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    return step


def te_attention(
    lengths: np.ndarray,
    x: SimpleNamespace,
    prepare: Callable[[Any], None] = lambda _: None,
    **options: Any,
) -> Step:
    """Transformer Engine's module on a packed sequence of these lengths, on cuDNN's kernels."""
    os.environ["NVTE_FUSED_ATTN"], os.environ["NVTE_FLASH_ATTN"] = "1", "0"
    heads, dim = x.q.shape[1:]
    dims = dim if x.v.shape[-1] == dim else (dim, x.v.shape[-1])
    module = te.DotProductAttention(
        heads, dims, x.k.shape[1], qkv_format="thd", attn_mask_type="padding_causal", **options
    )
    prepare(module)
    bounds = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))).to("cuda", torch.int32)
    longest = int(lengths.max())
    q, k, v = leaves(x.q, x.k, x.v)

    def attend(query: Tensor) -> Tensor:
        return module(
            query,
            k,
            v,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ).view(x.dout.shape)

    return layers_of(attend, [q, k, v], x.dout)


def te_context_parallel(kind: str, lengths: np.ndarray, group: Any) -> Step:
    """Transformer Engine's own context parallelism, documents padded to 2 * CP."""
    cp = dist.get_world_size(group)
    lengths = -(-lengths // (2 * cp)) * 2 * cp
    ranks, stream = list(range(cp)), torch.cuda.Stream()
    x = tensors(int(lengths.sum()) // cp)
    return te_attention(lengths, x, lambda m: m.set_context_parallel_group(group, ranks, stream, kind))


def measure(
    step: Step, agree: Callable[[int], int] = int, seconds: float = 0.06, most: int = 9
) -> tuple[float, float, float, float]:
    """p20, p50, p80 of GPU ms of one layer, and host ms to launch one more layer (of five in one graph)."""
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    # Ranks that communicate must take the same number of steps.
    count = agree(max(3, min(most, int(seconds / (time.perf_counter() - begin)))))
    launched = []
    for layers in (1, 5, 1, 5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step(layers)
        launched.append(time.perf_counter() - begin)
    host = (min(launched[1::2]) - min(launched[::2])) / 4 * 1e3
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    p20, p50, p80 = np.percentile([a.elapsed_time(b) for a, b in pairwise(marks)], (20, 50, 80))
    return float(p20), float(p50), float(p80), host


def machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "te": version("transformer_engine"),
        "cudnn": str(torch.backends.cudnn.version()),
        "kernels": KERNELS.name,
        "fa4": version("flash-attn-4") if KERNELS.name == "fa4" else "",
        "date": time.strftime("%Y-%m-%d"),
    }


def padded_to(lengths: list[int], multiple: int) -> np.ndarray:
    pad = padding(sum(lengths), multiple)
    return np.array(lengths + [pad] * (pad > 0), dtype=np.int64)


def timing(mix: str, cp: int, kind: str, rank: int, times: Any, stamp: dict[str, str]) -> dict[str, Any]:
    named = dict(zip(("p20_ms", "p50_ms", "p80_ms", "host_ms"), times, strict=True))
    return {"mix": mix, "cp": cp, "attention": kind, "rank": rank} | named | stamp
