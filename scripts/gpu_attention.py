#!/usr/bin/env python3
"""Correctness and speed of sharded attention on GPUs: one layer, forward and backward, bf16.

    python3 scripts/gpu_attention.py share --mixes mixes.json --out DIR          # each rank's share on one GPU
    torchrun --nproc-per-node 2 scripts/gpu_attention.py real --mixes mixes.json --out DIR

mixes.json: {"name": [document lengths], ...}. Writes DIR/<mode>.csv and prints tables. Errors are norms of the
difference to an fp32 reference over its norm, beside those of Transformer Engine's own unsharded attention.
In `share` the exchange is simulated: its copies count, its transfer does not.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import Tensor

from wlb_megatron.attention import kv_exchange
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.sharded_attention import sharded_attention
from wlb_megatron.attention.te_backend import TransformerEngineKernels
from wlb_megatron.attention.torch_backend import TorchKernels
from wlb_megatron.sharding.alignment import padding
from wlb_megatron.sharding.attention_calls import AttentionLayout, attention_layout
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard

HEADS, KV_HEADS, DIM = 8, 2, 128
SCALE = DIM**-0.5
SPLIT = {"whole": 1 << 30, "split>=1K": 1024, "split": 0}
KINDS = ("per-sequence", "per-document", "hybrid")
KERNELS = TransformerEngineKernels()


def tensors(tokens: int, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(heads: int) -> Tensor:
        return torch.randn(tokens, heads, DIM, generator=generator, device="cuda", dtype=torch.bfloat16).to(
            dtype
        )

    return SimpleNamespace(q=normal(HEADS), k=normal(KV_HEADS), v=normal(KV_HEADS), dout=normal(HEADS))


def reference(lengths: np.ndarray, x: SimpleNamespace) -> list[Tensor]:
    """Output, dq, dk, dv in fp32, a document and 1024 queries at a time."""
    kernels = TorchKernels()
    q, k, v, dout = (t.float() for t in (x.q, x.k, x.v, x.dout))
    kv = torch.stack((k, v), dim=1)
    out, dq, dkv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(kv)
    start = 0
    for length in lengths.tolist():
        for begin in range(0, length, 1024):
            end = min(begin + 1024, length)
            rows, keys = slice(start + begin, start + end), slice(start, start + end)
            call: Any = SimpleNamespace(mask="bottom-right", segments=((0, end - begin, 0, end),))
            out[rows], lse = kernels.forward(call, q[rows], kv[keys], SCALE)
            dq[rows], part = kernels.backward(call, q[rows], kv[keys], out[rows], lse, dout[rows], SCALE)
            dkv[keys] += part
        start += length
    return [out, dq, dkv[:, 0], dkv[:, 1]]


def errors(got: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((a.detach().float() - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]


def leaves(*given: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in given]


def unsharded(lengths: np.ndarray, x: SimpleNamespace) -> Callable[[], list[Tensor]]:
    """Transformer Engine's own attention over the whole packed sequence."""
    module = te.DotProductAttention(HEADS, DIM, KV_HEADS, qkv_format="thd", attn_mask_type="padding_causal")
    bounds = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))).to("cuda", torch.int32)
    longest = int(lengths.max())
    q, k, v = leaves(x.q, x.k, x.v)

    def step() -> list[Tensor]:
        out = module(
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        ).view(-1, HEADS, DIM)
        return [out, *torch.autograd.grad(out, (q, k, v), x.dout)]

    return step


class Simulated:
    """A process group of one process: what would arrive is taken from the whole packed sequence's keys."""

    def __init__(self, plan: ShardPlan, layout: AttentionLayout, kv: Tensor) -> None:
        reach = np.diff(np.append(layout.exchange.key_starts, layout.exchange.buffer_rows))
        packed = np.concatenate(
            [np.arange(n) + s for n, s in zip(reach, plan.piece_starts[:-1], strict=True)]
        )
        arriving = np.empty(len(packed), np.int64)
        arriving[layout.exchange.place] = packed
        self.arriving = torch.from_numpy(arriving).cuda()
        self.arrived = kv[self.arriving]
        self.back = kv.new_zeros((len(layout.exchange.send_rows), *kv.shape[1:]))
        self.returned: Tensor | None = None
        self.gathers = True

    def __call__(self, sent: Tensor) -> Tensor:
        self.gathers = not self.gathers
        if not self.gathers:
            return self.arrived
        self.returned = sent
        return self.back


def simulate_exchange() -> None:
    def all_to_all(sent: Tensor, send_counts: Any, recv_counts: Any, group: Simulated) -> tuple[Tensor, Any]:
        return group(sent), SimpleNamespace(wait=lambda: None)

    kv_exchange._all_to_all = all_to_all


def share(
    plan: ShardPlan, rank: int, split_from: int, x: SimpleNamespace, kv: Tensor
) -> tuple[Any, Any, Any]:
    """One rank's step on one GPU: (step, simulated group, rows of x)."""
    layout = attention_layout(plan, rank, split_from)
    group = Simulated(plan, layout, kv)
    on_device = device_layout(layout, "cuda")
    index = torch.from_numpy(plan.packed_index(rank)).cuda()
    q, k, v, dout = (t[index] for t in (x.q, x.k, x.v, x.dout))
    q, k, v = leaves(q, k, v)

    def step() -> list[Tensor]:
        out = sharded_attention(q, k, v, on_device, group, KERNELS, SCALE)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    return step, group, index


def sharded_by_turns(plan: ShardPlan, split_from: int, x: SimpleNamespace) -> list[Tensor]:
    """All ranks' shares one after the other; output and gradients in packed order."""
    kv = torch.stack((x.k, x.v), dim=1)
    out, dq, dkv = torch.empty_like(x.q), torch.empty_like(x.q), torch.zeros_like(kv, dtype=torch.float32)
    for rank in range(plan.cp_size):
        step, group, index = share(plan, rank, split_from, x, kv)
        out[index], dq[index], dk, dv = step()
        dkv[index] += torch.stack((dk, dv), dim=1)
        if group.returned is not None:
            dkv.index_add_(0, group.arriving, group.returned.float())
    return [out, dq, dkv[:, 0], dkv[:, 1]]


def measure(
    step: Callable[[], Any], agree: Callable[[int], int] = int, seconds: float = 0.06, most: int = 9
) -> tuple[float, float, float, float]:
    """p20, p50, p80 of GPU ms, and host ms to launch (smallest of three, GPU idle before)."""
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    # Ranks that communicate must take the same number of steps.
    count = agree(max(3, min(most, int(seconds / (time.perf_counter() - begin)))))
    host = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        host.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    p20, p50, p80 = np.percentile(times, (20, 50, 80))
    return float(p20), float(p50), float(p80), min(host)


def tables(path: Path, rows: list[dict[str, Any]]) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "te": te.__version__ if hasattr(te, "__version__") else "",
        "cudnn": str(torch.backends.cudnn.version()),
        "date": time.strftime("%Y-%m-%d"),
    }


def padded_to(lengths: list[int], multiple: int) -> np.ndarray:
    pad = padding(sum(lengths), multiple)
    return np.array(lengths + [pad] * (pad > 0), dtype=np.int64)


def check(mixes: dict[str, list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Errors of every sharding, CP and shape on the mixes cut to a quarter, odd lengths kept odd."""
    rows = []
    print(
        f"{'mix':16}{'sharding':14}{'cp':>3} {'shape':10}{'out':>9}{'dq':>9}{'dk':>9}{'dv':>9}{'worst/TE':>10}"
    )
    for name, given in mixes.items():
        lengths = padded_to([max(1, n // 4) | 1 for n in given] + [1, 2, 15, 16], 8)
        x = tensors(int(lengths.sum()))
        expected = reference(lengths, x)
        base = errors(unsharded(lengths, x)(), expected)
        found = [("unsharded TE", 1, "", base)]
        for kind in KINDS:
            for cp in (2, 4, 8):
                for shape, split_from in SPLIT.items():
                    got = sharded_by_turns(shard(lengths, cp, kind), split_from, x)
                    found.append((kind, cp, shape, errors(got, expected)))
        for kind, cp, shape, error in found:
            worst = max(a / b for a, b in zip(error, base, strict=True))
            text = "".join(f"{e:9.2e}" for e in error)
            print(
                f"{name:16}{kind:14}{cp:3} {shape:10}{text}{worst:10.2f}{'  FAIL' if not worst <= 1.5 else ''}"
            )
            rows.append(
                {"mix": name, "sharding": kind, "cp": cp, "shape": shape}
                | dict(zip(("out", "dq", "dk", "dv"), error, strict=True))
                | {"worst_over_te": worst}
            )
    return rows


def time_shares(mixes: dict[str, list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    stamp = machine()
    print(f"\n{'mix':16}{'cp':>3}{'TE/CP':>8}  slowest rank, GPU ms p50 (host ms)")
    for name, given in mixes.items():
        lengths = padded_to(given, 16)
        x = tensors(int(lengths.sum()))
        kv = torch.stack((x.k, x.v), dim=1)
        whole = measure(unsharded(lengths, x))
        rows.append(_row(name, 1, "unsharded TE", "", 0, whole, stamp))
        for cp in args.cp:
            line = f"{name:16}{cp:3}{whole[1] / cp:8.2f}  "
            for kind in KINDS:
                plan = shard(lengths, cp, kind)
                for shape in args.shapes:
                    times = []
                    for rank in range(cp):
                        step, _, _ = share(plan, rank, SPLIT[shape], x, kv)
                        times.append(measure(step))
                        rows.append(_row(name, cp, kind, shape, rank, times[-1], stamp))
                    slowest = max(times, key=lambda t: t[1])
                    line += f" {kind[4:7]} {shape} {slowest[1]:.2f} ({slowest[3]:.2f})"
            print(line, flush=True)
    return rows


def _row(name: str, cp: int, kind: str, shape: str, rank: int, times: Any, stamp: Any) -> dict[str, Any]:
    p20, p50, p80, host = times
    return {
        "mix": name,
        "cp": cp,
        "attention": kind,
        "shape": shape,
        "rank": rank,
        "p20_ms": p20,
        "p50_ms": p50,
        "p80_ms": p80,
        "host_ms": host,
    } | stamp


def profile(name: str, step: Callable[[], Any]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    allocations = torch.cuda.memory_stats()["num_device_alloc"]
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(5):
            step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["num_device_alloc"] - allocations
    print(f"\nprofile of {name}, us a step; no device sync; {allocations / 5} device allocations a step")
    events = trace.key_averages()
    for kind in ("self_device_time_total", "self_cpu_time_total"):
        print(f"  {kind}, {sum(getattr(e, kind) for e in events) / 5:.0f} in all")
        for event in sorted(events, key=lambda e: -getattr(e, kind))[:16]:
            print(f"  {getattr(event, kind) / 5:9.1f} {event.count / 5:5.1f}x {event.key[:110]}")


def te_context_parallel(kind: str, lengths: np.ndarray, group: Any) -> Callable[[], Any]:
    """Transformer Engine's own context parallelism, documents padded to 2 * CP."""
    cp = dist.get_world_size(group)
    lengths = -(-lengths // (2 * cp)) * 2 * cp
    module = te.DotProductAttention(HEADS, DIM, KV_HEADS, qkv_format="thd", attn_mask_type="padding_causal")
    module.set_context_parallel_group(group, list(range(cp)), torch.cuda.Stream(), kind)
    bounds = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))).to("cuda", torch.int32)
    longest = int(lengths.max())
    x = tensors(int(lengths.sum()) // cp)
    q, k, v = leaves(x.q, x.k, x.v)

    def step() -> None:
        out = module(
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        ).view(-1, HEADS, DIM)
        torch.autograd.grad(out, (q, k, v), x.dout)

    return step


def real(mixes: dict[str, list[int]], args: argparse.Namespace) -> None:
    """Every rank in its own process over NCCL."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, cp, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    say = print if rank == 0 else lambda *a, **k: None

    def ours(
        plan: ShardPlan, split_from: int, x: SimpleNamespace, keep: bool = True
    ) -> Callable[[], list[Tensor]]:
        layout = device_layout(attention_layout(plan, rank, split_from), "cuda")
        index = torch.from_numpy(plan.packed_index(rank)).cuda()
        q, k, v, dout = (t[index] for t in (x.q, x.k, x.v, x.dout))
        q, k, v = leaves(q, k, v)

        def step() -> list[Tensor]:
            out = sharded_attention(q, k, v, layout, group, KERNELS, SCALE, keep)
            return [out, *torch.autograd.grad(out, (q, k, v), dout)]

        return step

    say(f"{'mix':16}{'sharding':14}{'shape':12}{'out':>9}{'dq':>9}{'dk':>9}{'dv':>9}{'worst/TE':>10}")
    for name, given in mixes.items():
        lengths = padded_to([max(1, n // 4) | 1 for n in given] + [1, 2, 15, 16], cp)
        x = tensors(int(lengths.sum()))
        expected = reference(lengths, x)
        base = errors(unsharded(lengths, x)(), expected)
        for kind in KINDS:
            plan = shard(lengths, cp, kind)
            index = torch.from_numpy(plan.packed_index(rank)).cuda()
            for shape, split_from in SPLIT.items():
                for keep in (True, False):
                    got = ours(plan, split_from, x, keep)()
                    squares = torch.stack(
                        [
                            (a.detach().float() - b[index]).square().sum()
                            for a, b in zip(got, expected, strict=True)
                        ]
                    )
                    dist.all_reduce(squares)
                    error = [float(s.sqrt() / b.norm()) for s, b in zip(squares, expected, strict=True)]
                    worst = max(a / b for a, b in zip(error, base, strict=True))
                    text = "".join(f"{e:9.2e}" for e in error)
                    mode = shape + ("" if keep else " again")
                    fail = "" if worst <= 1.5 else "  FAIL"
                    say(f"{name:16}{kind:14}{mode:16}{text}{worst:10.2f}{fail}")

    def agree(count: int) -> int:
        least = torch.tensor(count, device="cuda")
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    rows: list[dict[str, Any]] = []
    stamp = machine()
    say(f"\n{'mix':16} wall ms a layer, slowest rank's p50 (host ms)")
    for name, given in mixes.items():
        lengths = padded_to(given, 16)
        x = tensors(int(lengths.sum()))
        candidates: dict[tuple[str, str], Callable[[], Callable[[], Any]]] = {
            ("TE p2p", ""): lambda lengths=lengths: te_context_parallel("p2p", lengths, group),
            ("TE all_gather", ""): lambda lengths=lengths: te_context_parallel("all_gather", lengths, group),
        }
        for kind in KINDS:
            plan = shard(lengths, cp, kind)
            for shape, split_from in SPLIT.items():
                candidates[kind, shape] = lambda plan=plan, s=split_from, x=x: ours(plan, s, x)
            candidates[kind, "split, again"] = lambda plan=plan, x=x: ours(plan, 0, x, False)
        line = f"{name:16}"
        for (kind, shape), make in candidates.items():
            times = torch.tensor(measure(make(), agree, most=15), device="cuda")
            dist.all_reduce(times, dist.ReduceOp.MAX)
            p20, p50, p80, host = times.tolist()
            rows.append(_row(name, cp, kind, shape, -1, (p20, p50, p80, host), stamp))
            line += f" | {kind} {shape} {p50:.2f} ({host:.2f})"
        say(line, flush=True)
    if rank == 0:
        tables(args.out / "real.csv", rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("share", "real"))
    parser.add_argument("--mixes", type=Path, required=True)
    parser.add_argument("--only", help="comma list of mixes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cp", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--shapes", nargs="+", choices=SPLIT, default=["whole", "split"])
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument(
        "--profile", default="", help="comma list of mixes whose shares at the last CP are profiled"
    )
    args = parser.parse_args()
    mixes = json.loads(args.mixes.read_text())
    if args.only:
        mixes = {name: mixes[name] for name in args.only.split(",")}
    args.out.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.mode == "real":
        real(mixes, args)
        return
    simulate_exchange()
    if not args.no_check:
        tables(args.out / "errors.csv", check(mixes, args))
    tables(args.out / "share.csv", time_shares(mixes, args))
    for name in filter(None, args.profile.split(",")):
        lengths = padded_to(mixes[name], 16)
        x = tensors(int(lengths.sum()))
        kv = torch.stack((x.k, x.v), dim=1)
        for kind in ("per-document", "hybrid"):
            plan = shard(lengths, args.cp[-1], kind)
            layout = attention_layout(plan, 1)
            begin = time.perf_counter()
            device_layout(attention_layout(plan, 1), "cuda")
            print(
                f"\nlayout of {name}, {kind}: {(time.perf_counter() - begin) * 1e3:.2f} ms of host time a micro-batch"
            )
            print([(c.mask, c.rows, len(c.cu_seqlens_q) - 1, int(c.kv_starts[-1])) for c in layout.calls])
            profile(f"{name}, CP={args.cp[-1]}, {kind}", share(plan, 1, 0, x, kv)[0])


if __name__ == "__main__":
    sys.exit(main())
