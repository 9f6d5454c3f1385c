"""A document in chunks against the whole one: time, errors and memory of one layer's attention, both ways."""

from __future__ import annotations

import argparse
import os
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scripts.bench.attention.attention_bench import (
    KERNELS,
    SCALE,
    errors,
    leaves,
    machine,
    measure,
    reference,
    tensors,
)
from scripts.bench.attention.attention_steps import Mixes
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.key_cache import KeyCache, cached_bytes
from wlb_megatron.attention.sharded_attention import sharded_attention
from wlb_megatron.plan import Piece
from wlb_megatron.report.table import write_csv
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.chunks import links_of
from wlb_megatron.sharding.select import shard_all

COUNTS = (1, 2, 4, 8)
QUADRATIC_AT = 24576
"""Tokens at which attention costs as much as the rest of a layer: chunks are of like work by that."""


def bounds_of(tokens: int, count: int, multiple: int) -> list[int]:
    """Where chunks of like work begin, and the end: chunk [s, e) costs (e - s) + (e * e - s * s) / QUADRATIC_AT."""
    whole = tokens + tokens * tokens / QUADRATIC_AT
    half = QUADRATIC_AT / 2
    ends = [(half * half + QUADRATIC_AT * whole * at / count) ** 0.5 - half for at in range(count + 1)]
    return [round(end / multiple) * multiple for end in ends]


class Chunked:
    """The step of one rank: forwards of all chunks, then their backwards, last first."""

    def __init__(self, x: SimpleNamespace, count: int, cp: int, rank: int, group: Any) -> None:
        bounds = list(pairwise(bounds_of(len(x.q), count, 256 * cp)))
        pieces = [(Piece(0, 0, start, end, start),) for start, end in bounds]
        lengths = [[end - start] for start, end in bounds]
        plans = shard_all(lengths, cp, "per-document", links=links_of(pieces))
        device, self.group, self.held = x.q.device, group, 0
        self.layouts = [device_layout(attention_layout(plan, rank), device) for plan in plans]
        places = [start + plan.packed_index(rank) for (start, _), plan in zip(bounds, plans, strict=True)]
        self.rows = torch.from_numpy(np.concatenate(places)).to(device)
        rows = self.rows.split([len(place) for place in places])
        self.inputs = [leaves(x.q[own], x.k[own], x.v[own]) for own in rows]
        self.douts = [x.dout[own] for own in rows]

    def __call__(self, layers: int = 1) -> list[torch.Tensor]:
        """Output, dq, dk, dv of the rank's rows."""
        caches = [KeyCache() for _ in range(layers)]
        outs = []
        for layout, (out, k, v) in zip(self.layouts, self.inputs, strict=True):
            for cache in caches:
                out = sharded_attention(out, k, v, layout, self.group, KERNELS, SCALE, cache=cache)
            outs.append(out)
        self.held = cached_bytes() // layers
        grads = [
            torch.autograd.grad(out, inputs, dout)
            for out, inputs, dout in zip(outs[::-1], self.inputs[::-1], self.douts[::-1], strict=True)
        ]
        return [torch.cat(outs).detach(), *(torch.cat(parts) for parts in zip(*grads[::-1], strict=True))]


def chunks(mixes: Mixes, args: argparse.Namespace) -> None:
    """Of each mix the longest document, alone; on one GPU, or over as many as torchrun starts."""
    cp, rank, group = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")), None
    if cp > 1:
        dist.init_process_group("nccl")
        group = dist.group.WORLD
    rows = []
    if rank == 0:
        print(
            f"{'tokens':>8}{'cp':>3}{'chunks':>7}{'ms':>9}{'of whole':>9}{'error / whole':>14}{'keys MiB':>9}"
            f"{'peak MiB':>9}"
        )
    for tokens in sorted({max(lengths) // (256 * cp) * 256 * cp for lengths in mixes.values()}):
        x = tensors(tokens)
        expected = None if args.no_check else reference(np.array([tokens]), x)
        whole_ms, whole_error = 0.0, 0.0
        for count in COUNTS:
            step = Chunked(x, count, cp, rank, group)
            got = step()
            error = 0.0 if expected is None else max(errors(got, [tensor[step.rows] for tensor in expected]))
            del got
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ms = measure(step, agree=lambda _: 5)[1]
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            if count == 1:
                whole_ms, whole_error = ms, error or 1.0
            row = {"tokens": tokens, "cp": cp, "chunks": count, "ms": ms, "of_whole": ms / whole_ms}
            row |= {"error": error, "error_of_whole": error / whole_error}
            row |= {"keys_mib": step.held / 2**20, "peak_mib": peak}
            rows.append(row | machine())
            if rank == 0:
                print(
                    f"{tokens:8}{cp:3}{count:7}{ms:9.2f}{ms / whole_ms:9.3f}{error / whole_error:14.2f}"
                    f"{step.held / 2**20:9.1f}{peak:9.1f}",
                    flush=True,
                )
    if rank == 0:
        write_csv(args.out / "chunks.csv", rows)
    if cp > 1:
        dist.destroy_process_group()
