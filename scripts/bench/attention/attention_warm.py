"""What graph buckets cost: building one, running work in a larger one, and steps before and after a warm-up."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scripts.bench.attention.attention_bench import DIM, HEADS, KV_HEADS, machine, tensors
from scripts.bench.attention.attention_steps import Mixes, share
from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.kernels.graph_buckets import Bucket, bucket, foreseen, padded_keys, padded_queries
from wlb_megatron.attention.kernels.te_backend import TransformerEngineKernels
from wlb_megatron.attention.kernels.warm_up import warm_up
from wlb_megatron.report.files import write_csv
from wlb_megatron.sharding.alignment import padding
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard

CP, WINDOW, STEPS, SEQUENCES = 4, 131072, 200, 64


def warm(mixes: Mixes, args: argparse.Namespace) -> None:
    padded_buckets(args)
    plans = micro_batches(mixes, STEPS)
    say_steps("before a warm-up", run_steps(plans), args)
    met = {key for plan, rank in plans for key in keys_of(plan, rank)}
    begin = time.perf_counter()
    count = warm_up(
        TransformerEngineKernels(),
        foreseen(int(1.5 * WINDOW), CP, SEQUENCES, SEQUENCES, None),
        heads=HEADS + 2,  # other graphs than the steps' so far
        kv_heads=KV_HEADS,
        dim=DIM,
        v_dim=DIM,
        scale=DIM**-0.5,
        dtype=torch.bfloat16,
        device="cuda",
    )
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    print(
        f"\nwarm-up of {count} buckets: {took:.2f} s, {took / count * 1e3:.0f} ms each; 200 steps met {len(met)}"
    )
    missing = met - {
        (causal, bucket(*sizes))
        for causal, _, sizes in foreseen(int(1.5 * WINDOW), CP, SEQUENCES, SEQUENCES, None)
    }
    print(f"met but not foreseen: {len(missing)} {sorted(missing)[:4]}")
    say_steps("after it", run_steps(plans, heads=HEADS + 2), args)


def micro_batches(mixes: Mixes, count: int) -> list[tuple[ShardPlan, int]]:
    """Random micro-batches of 0.4 to 1.5 windows of the mixes' documents, each with a rank."""
    rng = np.random.default_rng(7)
    pool = np.array([length for lengths in mixes.values() for length in lengths])
    plans = []
    for step in range(count):
        most, chosen = int(rng.uniform(0.4, 1.5) * WINDOW), []
        for length in rng.choice(pool, 400):
            if sum(chosen) + length <= most:
                chosen.append(int(length))
        chosen.append(padding(sum(chosen), 4 * CP) or 4 * CP)
        plans.append((shard(chosen, CP, "adaptive"), step % CP))
    return plans


def keys_of(plan: ShardPlan, rank: int) -> list[tuple[bool, Bucket]]:
    layout = attention_layout(plan, rank)
    t = layout.tokens
    graph_keys = [(True, bucket(len(layout.diagonals.cu_seqlens_q) - 1, t, t))]
    if (call := layout.rectangles) is not None:
        rows, keys = padded_queries(int(call.cu_seqlens_q[-1])), padded_keys(int(call.cu_seqlens_kv[-1]))
        graph_keys.append((False, bucket(len(call.cu_seqlens_q) - 1, rows, keys)))
    return graph_keys


@dataclass(frozen=True)
class Step:
    host_ms: float
    new: int
    keys: str


def run_steps(plans: list[tuple[ShardPlan, int]], heads: int = HEADS) -> list[Step]:
    """Host time to launch one layer's forward and backward of each plan's rank, and how many buckets were new."""
    x = tensors(int(1.6 * WINDOW), heads)
    kv = torch.stack((x.k, x.v), dim=1)
    share(*plans[0], x, kv)[0]()  # Triton's kernels compile
    met: set[Any] = set(keys_of(*plans[0]))
    steps = []
    for plan, rank in plans:
        step = share(plan, rank, x, kv)[0]
        keys = keys_of(plan, rank)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        took = (time.perf_counter() - begin) * 1e3
        steps.append(Step(took, len(set(keys) - met), str(keys)))
        met.update(keys)
    torch.cuda.synchronize()
    return steps


def say_steps(when: str, steps: list[Step], args: argparse.Namespace) -> None:
    times = np.array([step.host_ms for step in steps])
    median = float(np.median(times))
    slow = [step for step in steps if step.host_ms > 5 * median]
    fresh = [step for step in steps if step.new]
    print(
        f"\n{len(steps)} steps {when}: host ms median {median:.2f}, p95 {np.percentile(times, 95):.2f}, most "
        f"{times.max():.2f}; above 5 x median: {len(slow)}, of which {sum(s.new > 0 for s in slow)} met a new bucket "
        f"({len(fresh)} steps did); total {times.sum():.0f} ms"
    )
    for step in slow[:8]:
        print(f"  {step.host_ms:9.2f} ms, {step.new} new: {step.keys}")
    rows = [{"when": when, "host_ms": s.host_ms, "new_buckets": s.new} | machine() for s in steps]
    write_csv(args.out / f"warm_{when.split()[0]}.csv", rows)


def padded_buckets(args: argparse.Namespace) -> None:
    """16 documents of 1,024 tokens in ever larger graphs: sequences without tokens, rows that nothing reads."""
    kernels, rows = TransformerEngineKernels(), []
    print(
        f"{'call':12}{'sequences':>10}{'q rows':>8}{'k rows':>8}{'first ms':>10}{'GPU ms':>8}{'host ms':>9}"
    )
    grid = [(32, 16384, 16384)]
    grid += [(b, 16384, 16384) for b in (128, 512, 1024, 4096)]
    grid += [(32, t, t) for t in (32768, 65536, 131072)]
    grid += [(32, 16384, t) for t in (65536, 131072)]
    for causal in (True, False):
        for b, q_rows, k_rows in grid:
            if causal and q_rows != k_rows:
                continue
            x = tensors(max(q_rows, k_rows))
            q, kv = x.q[:q_rows], torch.stack((x.k, x.v), dim=1)[:k_rows]
            ends = torch.arange(17, dtype=torch.int32) * 1024
            bounds = torch.cat((ends, ends[-1:].expand(b - 16))).cuda()
            call = DeviceCall(causal, None, bounds, bounds, 1024, 1024, q_rows, k_rows, ())
            dout = x.dout[:q_rows]

            def step(k: Any = kernels, c: Any = call, q: Any = q, kv: Any = kv, d: Any = dout) -> None:
                out, lse = k.forward(c, q, kv, DIM**-0.5)
                k.backward(c, q, kv, out, lse, d, DIM**-0.5)

            torch.cuda.synchronize()
            begin = time.perf_counter()
            step()
            first = (time.perf_counter() - begin) * 1e3
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            begin = time.perf_counter()
            for _ in range(10):
                step()
            host = (time.perf_counter() - begin) * 100
            end.record()
            torch.cuda.synchronize()
            gpu, name = start.elapsed_time(end) / 10, "diagonal" if causal else "rectangle"
            print(f"{name:12}{b:10}{q_rows:8}{k_rows:8}{first:10.1f}{gpu:8.3f}{host:9.3f}", flush=True)
            rows.append(
                {"call": name, "sequences": b, "queries": q_rows, "keys": k_rows}
                | {"first_ms": first, "gpu_ms": gpu, "host_ms": host}
                | machine()
            )
    write_csv(args.out / "warm_buckets.csv", rows)
