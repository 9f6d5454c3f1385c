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
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attention_bench import (
    KERNELS,
    SCALE,
    Step,
    errors,
    layers_of,
    leaves,
    machine,
    measure,
    padded_to,
    profile,
    reference,
    tables,
    te_attention,
    te_context_parallel,
    tensors,
)
from torch import Tensor

from wlb_megatron.attention import kv_exchange
from wlb_megatron.attention.device_layout import DeviceLayout, device_layout
from wlb_megatron.attention.sharded_attention import sharded_attention
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard

Mixes = dict[str, list[int]]


def swapped(all_to_all: Callable[..., Any], step: Step, layers: int) -> list[Tensor]:
    """The step with another way for rows to travel."""
    real = kv_exchange._all_to_all
    kv_exchange._all_to_all = all_to_all
    try:
        return step(layers)
    finally:
        kv_exchange._all_to_all = real


def nothing_travels(sent: Tensor, send_counts: Any, recv_counts: Any, _: Any) -> tuple[Tensor, Any]:
    return sent.new_zeros((sum(recv_counts), *sent.shape[1:])), SimpleNamespace(wait=lambda: None)


class Simulated:
    """A process group of one process: what would arrive is given, what is sent back is kept."""

    def __init__(self, arrived: Tensor, send_counts: tuple[int, ...]) -> None:
        self.arrived = arrived
        self.send_counts = send_counts
        self.back = arrived.new_zeros((sum(send_counts), *arrived.shape[1:]))
        self.returned: Tensor | None = None

    def all_to_all(self, sent: Tensor, send_counts: Any, recv_counts: Any, _: Any) -> tuple[Tensor, Any]:
        done = SimpleNamespace(wait=lambda: None)
        if send_counts is self.send_counts:
            return self.arrived, done
        self.returned = sent
        return self.back, done


def share(
    plan: ShardPlan, rank: int, x: SimpleNamespace, kv: Tensor
) -> tuple[Step, Simulated, Tensor, Tensor]:
    """One rank's step on one GPU, its simulated group, and the packed rows of its tokens and of what arrives."""
    arriving = []
    for sender in range(plan.cp_size):
        theirs = attention_layout(plan, sender).exchange
        begin = sum(theirs.send_counts[:rank])
        rows = theirs.send_rows[begin : begin + theirs.send_counts[rank]]
        arriving.append(plan.packed_index(sender)[rows])
    packed = torch.from_numpy(np.concatenate(arriving)).cuda()
    layout = device_layout(attention_layout(plan, rank), "cuda")
    group = Simulated(kv[packed], layout.exchange.send_counts if layout.exchange else ())
    step, index = sharded_step(layout, plan.packed_index(rank), x, group)

    def alone(layers: int = 1) -> list[Tensor]:
        return swapped(group.all_to_all, step, layers)

    return alone, group, index, packed


def sharded_step(
    layout: DeviceLayout, packed: np.ndarray, x: SimpleNamespace, group: Any, keep_keys: bool = True
) -> tuple[Step, Tensor]:
    """A rank's step over a group, and the packed rows of its tokens."""
    index = torch.from_numpy(packed).cuda()
    q, k, v, dout = (t[index] for t in (x.q, x.k, x.v, x.dout))
    q, k, v = leaves(q, k, v)

    def attend(query: Tensor) -> Tensor:
        return sharded_attention(query, k, v, layout, group, KERNELS, SCALE, keep_keys)

    return layers_of(attend, [q, k, v], dout), index


def sharded_by_turns(plan: ShardPlan, x: SimpleNamespace) -> list[Tensor]:
    """All ranks' shares one after the other; output and gradients in packed order."""
    kv = torch.stack((x.k, x.v), dim=1)
    out, dq, dkv = torch.empty_like(x.q), torch.empty_like(x.q), torch.zeros_like(kv, dtype=torch.float32)
    for rank in range(plan.cp_size):
        step, group, index, arriving = share(plan, rank, x, kv)
        out[index], dq[index], dk, dv = step()
        dkv[index] += torch.stack((dk, dv), dim=1)
        if group.returned is not None:
            dkv.index_add_(0, arriving, group.returned.float())
    return [out, dq, dkv[:, 0], dkv[:, 1]]


class ErrorTable:
    """Prints errors beside those of Transformer Engine's own attention, and keeps them."""

    def __init__(self, say: Callable[..., Any] = print) -> None:
        self.rows: list[dict[str, Any]] = []
        self.say = say
        say(f"{'mix':16}{'attention':22}{'cp':>3}{'out':>10}{'dq':>10}{'dk':>10}{'dv':>10}{'worst / TE':>12}")

    def add(self, mix: str, kind: str, cp: int, error: list[float], base: list[float]) -> None:
        worst = max(a / b for a, b in zip(error, base, strict=True))
        text = "".join(f"{e:10.2e}" for e in error)
        self.say(f"{mix:16}{kind:22}{cp:3}{text}{worst:12.2f}{'' if worst <= 1.5 else '  FAIL'}")
        named = dict(zip(("out", "dq", "dk", "dv"), error, strict=True))
        self.rows.append({"mix": mix, "attention": kind, "cp": cp} | named | {"worst_over_te": worst})


def checked_lengths(given: list[int], cp: int) -> np.ndarray:
    """A quarter of the lengths, odd, with some awkward ones: a reference in fp32 takes a second."""
    return padded_to([max(1, n // 4) | 1 for n in given] + [1, 2, 15, 16], cp)


def check(mixes: Mixes, args: argparse.Namespace) -> None:
    table = ErrorTable()
    for name, given in mixes.items():
        lengths = checked_lengths(given, 8)
        x = tensors(int(lengths.sum()))
        expected = reference(lengths, x)
        base = errors(te_attention(lengths, x)(), expected)
        table.add(name, "unsharded TE", 1, base, base)
        for kind in args.kinds:
            for cp in (2, 4, 8):
                table.add(
                    name, kind, cp, errors(sharded_by_turns(shard(lengths, cp, kind), x), expected), base
                )
    tables(args.out / "errors.csv", table.rows)


def time_shares(mixes: Mixes, args: argparse.Namespace) -> None:
    rows = []
    stamp = machine()
    total: dict[tuple[int, str], float] = {}
    print(f"\n{'mix':16}{'cp':>3}{'TE / CP':>9}  slowest rank: GPU ms p50 (host ms)")
    for name, given in mixes.items():
        lengths = padded_to(given, 16)
        x = tensors(int(lengths.sum()))
        kv = torch.stack((x.k, x.v), dim=1)
        whole = measure(te_attention(lengths, x))
        rows.append(timing(name, 1, "unsharded TE", 0, whole, stamp))
        for cp in args.cp:
            line = f"{name:16}{cp:3}{whole[1] / cp:9.2f}  "
            total[cp, "TE / CP"] = total.get((cp, "TE / CP"), 0.0) + whole[1] / cp
            for kind in args.kinds:
                plan = shard(lengths, cp, kind)
                times = [measure(share(plan, rank, x, kv)[0]) for rank in range(cp)]
                rows += [timing(name, cp, kind, rank, t, stamp) for rank, t in enumerate(times)]
                slowest = max(times, key=lambda t: t[1])
                total[cp, kind] = total.get((cp, kind), 0.0) + slowest[1]
                line += f"  {kind} {slowest[1]:.2f} ({slowest[3]:.2f})"
            print(line, flush=True)
    for cp in args.cp:
        base = total[cp, "TE / CP"]
        kinds = ("TE / CP", *args.kinds)
        print(
            f"sum, CP={cp}: "
            + "  ".join(f"{k} {total[cp, k]:.2f} ms ({base / total[cp, k]:.1%})" for k in kinds)
        )
    tables(args.out / "share.csv", rows)


def timing(mix: str, cp: int, kind: str, rank: int, times: Any, stamp: dict[str, str]) -> dict[str, Any]:
    named = dict(zip(("p20_ms", "p50_ms", "p80_ms", "host_ms"), times, strict=True))
    return {"mix": mix, "cp": cp, "attention": kind, "rank": rank} | named | stamp


def profile_shares(mixes: Mixes, args: argparse.Namespace) -> None:
    cp = args.cp[-1]
    for name in filter(None, args.profile.split(",")):
        lengths = padded_to(mixes[name], 16)
        x = tensors(int(lengths.sum()))
        kv = torch.stack((x.k, x.v), dim=1)
        for kind in args.kinds:
            plan = shard(lengths, cp, kind)
            for _ in range(2):
                begin = time.perf_counter()
                layout = attention_layout(plan, 1)
                made = time.perf_counter()
                device_layout(layout, "cuda")
                sent = time.perf_counter()
            print(
                f"\nlayout: {(made - begin) * 1e3:.2f} ms, to the device: {(sent - made) * 1e3:.2f} ms of host time"
            )
            profile(f"{name}, CP={cp}, {kind}, rank 1", share(plan, 1, x, kv)[0])


def real(mixes: Mixes, args: argparse.Namespace) -> None:
    """Every rank in its own process over NCCL."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, cp, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    say = print if rank == 0 else lambda *a, **k: None

    def ours(plan: ShardPlan, x: SimpleNamespace, keep_keys: bool = True) -> tuple[Step, Tensor]:
        layout = device_layout(attention_layout(plan, rank), "cuda")
        return sharded_step(layout, plan.packed_index(rank), x, group, keep_keys)

    checked = [] if args.no_check else [name for name in mixes if not args.check or name in args.check]
    table = ErrorTable(say)
    for name in checked:
        lengths = checked_lengths(mixes[name], cp)
        x = tensors(int(lengths.sum()))
        expected = reference(lengths, x)
        base = errors(te_attention(lengths, x)(), expected)
        table.add(name, "unsharded TE", 1, base, base)
        for kind in args.kinds:
            for keep_keys in (True, False):
                step, index = ours(shard(lengths, cp, kind), x, keep_keys)
                pairs = zip(step(), expected, strict=True)
                squares = torch.stack([(a.detach().float() - b[index]).square().sum() for a, b in pairs])
                dist.all_reduce(squares)
                error = [float(s.sqrt() / b.norm()) for s, b in zip(squares, expected, strict=True)]
                table.add(name, kind + ("" if keep_keys else ", keys again"), cp, error, base)
    if rank == 0 and table.rows:
        tables(args.out / "real_errors.csv", table.rows)

    def agree(count: int) -> int:
        least = torch.tensor(count, device="cuda")
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    rows: list[dict[str, Any]] = []
    stamp = machine()
    say(f"\n{'mix':16}wall ms a layer, slowest rank's p50 (host ms)", flush=True)
    for name, given in mixes.items():
        lengths = padded_to(given, 16)
        x = tensors(int(lengths.sum()))
        steps: dict[str, Callable[[], Step]] = {
            "TE p2p": lambda n=lengths: te_context_parallel("p2p", n, group),
            "TE all_gather": lambda n=lengths: te_context_parallel("all_gather", n, group),
        }
        for kind in args.kinds:
            plan = shard(lengths, cp, kind)
            steps[kind] = lambda p=plan, x=x: ours(p, x)[0]
        # Of the last kind: keys exchanged again in backward; and with nothing travelling, so that the
        # difference is what is seen of the transfer.
        step = ours(plan, x)[0]
        steps[args.kinds[-1] + ", keys again"] = lambda p=plan, x=x: ours(p, x, False)[0]
        steps[args.kinds[-1] + ", no transfer"] = lambda s=step: lambda n=1: swapped(nothing_travels, s, n)
        line = f"{name:16}"
        for kind, make in steps.items():
            times = torch.tensor(measure(make(), agree, most=11), device="cuda")
            dist.all_reduce(times, dist.ReduceOp.MAX)
            rows.append(timing(name, cp, kind, -1, times.tolist(), stamp))
            line += f"  {kind} {times[1]:.2f} ({times[3]:.2f})"
        say(line, flush=True)
        if rank == 0:
            tables(args.out / "real.csv", rows)
    gains(rows, args.kinds, say)
    dist.destroy_process_group()


def gains(rows: list[dict[str, Any]], kinds: list[str], say: Callable[..., Any]) -> None:
    took = {(row["mix"], row["attention"]): row["p50_ms"] for row in rows}
    mixes = list(dict.fromkeys(row["mix"] for row in rows))
    for kind in kinds:
        each = [min(took[m, "TE p2p"], took[m, "TE all_gather"]) / took[m, kind] for m in mixes]
        mean = float(np.exp(np.mean(np.log(each))))
        say(f"{kind}: {mean:.3f}x the faster of TE's, geometric mean of {len(each)} (least {min(each):.3f}x)")
    seen = [1 - took[m, kinds[-1] + ", no transfer"] / took[m, kinds[-1]] for m in mixes]
    say(f"{kinds[-1]}: transfer seen, share of the layer: median {np.median(seen):.1%}, most {max(seen):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("share", "real"))
    parser.add_argument("--mixes", type=Path, required=True)
    parser.add_argument("--only", help="comma list of mixes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cp", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kinds", nargs="+", default=["per-sequence", "per-document", "hybrid"])
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument(
        "--check", nargs="+", help="in `real`, the mixes whose errors are measured (default all)"
    )
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
    if not args.no_check:
        check(mixes, args)
    time_shares(mixes, args)
    profile_shares(mixes, args)


if __name__ == "__main__":
    sys.exit(main())
