"""Each rank's share of sharded attention on one GPU: errors, times, and profiles of what it runs."""

from __future__ import annotations

import argparse
import time

import torch

from scripts.bench.attention.attention_bench import (
    errors,
    machine,
    measure,
    padded_to,
    profile,
    reference,
    te_attention,
    tensors,
    timing,
)
from scripts.bench.attention.attention_steps import (
    ErrorTable,
    Mixes,
    checked_lengths,
    planned,
    sharded_by_turns,
    share,
)
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.report.table import write_csv
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.select import shard


def shares(mixes: Mixes, args: argparse.Namespace) -> None:
    if not args.no_check:
        check(mixes, args)
    time_shares(mixes, args)
    profile_shares(mixes, args)


def check(mixes: Mixes, args: argparse.Namespace) -> None:
    table = ErrorTable()
    for name, documents in mixes.items():
        lengths = checked_lengths(documents, 8)
        x = tensors(int(lengths.sum()))
        expected = reference(lengths, x)
        base = errors(te_attention(lengths, x)(), expected)
        table.add(name, "unsharded TE", 1, base, base)
        for kind in args.kinds:
            for cp in (2, 4, 8):
                table.add(
                    name, kind, cp, errors(sharded_by_turns(shard(lengths, cp, kind), x), expected), base
                )
    write_csv(args.out / "errors.csv", table.rows)


def time_shares(mixes: Mixes, args: argparse.Namespace) -> None:
    rows = []
    stamp = machine()
    total: dict[tuple[int, str], float] = {}
    print(f"\n{'mix':16}{'cp':>3}{'TE / CP':>9}  slowest rank: GPU ms p50 (host ms)")
    for name, documents in mixes.items():
        lengths = padded_to(documents, 16)
        x = tensors(int(lengths.sum()))
        kv = torch.stack((x.k, x.v), dim=1)
        whole = measure(te_attention(lengths, x))
        rows.append(timing(name, 1, "unsharded TE", 0, whole, stamp))
        for cp in args.cp:
            line = f"{name:16}{cp:3}{whole[1] / cp:9.2f}  "
            total[cp, "TE / CP"] = total.get((cp, "TE / CP"), 0.0) + whole[1] / cp
            for kind in args.kinds:
                plan = planned(lengths, cp, kind)
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
    write_csv(args.out / "share.csv", rows)


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
