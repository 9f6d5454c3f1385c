"""Every sharding's slowest rank over windows, degrees and mixes; what adaptive chose, and what that cost; predictions.

Each rank's share runs alone on one GPU, its copies for the exchange included; what would be seen of the transfer is
added as the kernel table has it (measured between two GPUs). Windows below that of the mixes shrink every document.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from attention_bench import DIM, HEADS, KV_HEADS, machine, padded_to, te_attention, tensors
from attention_steps import Mixes, share

from wlb_megatron.report.files import write_csv
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.predict import predict
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard
from wlb_megatron.workload.kernel_table import KernelTable, h100
from wlb_megatron.workload.profile import read_profile

FIXED = ("per-sequence", "per-document", "hybrid")
IDEAL_FLOPS = 510e12
"""Rate of a top-left causal call on one long document, forward + backward, on one H100."""


HOST_BOUND_MS, PAUSE_CYCLES = 6.0, 5_000_000
"""Steps below this may wait for the host, which needs 1 to 2 ms to launch one; the pause is about 3 ms for each."""


def choice(mixes: Mixes, args: argparse.Namespace) -> None:
    table = h100()
    if args.profile_of:
        table = read_profile(args.profile_of).costs.table
        table = table.scaled(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    whole_window = max(sum(lengths) for lengths in mixes.values())
    for window in args.windows:
        for name, given in mixes.items():
            lengths = padded_to([max(1, n * window // whole_window) for n in given], 16)
            x = tensors(int(lengths.sum()))
            kv = torch.stack((x.k, x.v), dim=1)
            unsharded = timed(te_attention(lengths, x))[1]
            for cp in args.cp:
                rows += degree(lengths, cp, x, kv, table, unsharded, errors, name, window)
            told = [row for row in rows if row["mix"] == name and row["window"] == window]
            line = "  ".join(
                f"CP={row['cp']} {row['sharding']} {row['ms']:.2f}" for row in told if row["chosen"]
            )
            print(f"{window:7} {name:14} TE / 1 {unsharded:8.2f}  chosen: {line}", flush=True)
            write_csv(args.out / "choice.csv", rows)
            write_csv(args.out / "choice_predicted.csv", errors)
    report(rows, errors, args)


def degree(
    lengths: np.ndarray,
    cp: int,
    x: Any,
    kv: torch.Tensor,
    table: KernelTable,
    unsharded: float,
    errors: list[dict[str, Any]],
    name: str,
    window: int,
) -> list[dict[str, Any]]:
    """A row for each fixed sharding at one degree; the one whose plan adaptive takes is marked."""
    adaptive = shard(lengths, cp, "adaptive", table)
    measured: dict[bytes, tuple[list[Any], np.ndarray]] = {}
    rows, chosen = [], False
    for kind in FIXED:
        plan = shard(lengths, cp, kind, table)
        key = identity(plan)
        if key not in measured:
            times = [timed(share(plan, rank, x, kv)[0]) for rank in range(cp)]
            kernels = predict(plan, replace(table, exchange=0.0, exchange_row=0.0)) / 1e6
            measured[key] = times, kernels
            busy = any(attention_layout(plan, rank).rectangles is not None for rank in range(cp))
            errors += [
                {"window": window, "mix": name, "cp": cp, "rank": rank, "two_calls": busy}
                | {"predicted_ms": float(kernels[rank]), "measured_ms": times[rank][1]}
                for rank in range(cp)
            ]
        times, kernels = measured[key]
        exposed = predict(plan, table) / 1e6 - kernels
        slowest = max(range(cp), key=lambda rank: times[rank][1] + exposed[rank])
        p20, p50, p80 = (float(t + exposed[slowest]) for t in times[slowest])
        taken = not chosen and key == identity(adaptive)
        chosen |= taken
        rows.append(
            {"window": window, "mix": name, "cp": cp, "sharding": kind, "chosen": int(taken)}
            | {"ms": p50, "p20_ms": p20, "p80_ms": p80, "exposed_ms": float(exposed[slowest])}
            | {"predicted_ms": float((kernels + exposed).max()), "unsharded_ms": unsharded}
            | parts(plan, lengths, table)
            | machine()
        )
    assert chosen, "adaptive took a plan that is none of the fixed shardings'"
    return rows


def identity(plan: ShardPlan) -> bytes:
    return b"|".join(rows.tobytes() for rows in plan.ranks)


def parts(plan: ShardPlan, lengths: np.ndarray, table: KernelTable) -> dict[str, float]:
    """Predicted ms: FLOPs at the ideal rate, and what tiles, launches, exposed exchange and imbalance add to it."""
    still = replace(table, exchange=0.0, exchange_row=0.0)
    beside = (
        "call",
        "segment",
        "query_row",
        "key_row",
        "second_call",
        "moved_query",
        "moved_key",
        "tile_key",
    )
    bare = replace(still, **dict.fromkeys(beside, 0.0))
    every, alone, kernels = (predict(plan, t) / 1e6 for t in (table, still, bare))
    pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum())
    ideal = 3.5 * 4 * table.heads * table.head_dim * pairs / IDEAL_FLOPS * 1e3 / plan.cp_size
    return {
        "ideal_ms": ideal,
        "tile_ms": float(kernels.mean()) - ideal,
        "launch_ms": float((alone - kernels).mean()),
        "exchange_ms": float((every - alone).mean()),
        "imbalance_ms": float(every.max() - every.mean()),
    }


def timed(step: Any, most: int = 5, seconds: float = 0.12) -> tuple[float, float, float]:
    """p20, p50, p80 of GPU ms, of 3 to `most` steps after two; the first one may build a kernel's graph.

    Short steps are queued behind a pause, so that the device never waits for the host: in a model other work would
    fill that time.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    step()
    torch.cuda.synchronize()
    marks[0].record()
    step()
    marks[1].record()
    torch.cuda.synchronize()
    first = max(marks[0].elapsed_time(marks[1]), 1e-3)
    count = max(3, min(most, int(seconds * 1e3 / first)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    if first < HOST_BOUND_MS:
        torch.cuda._sleep(PAUSE_CYCLES * count)
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    return tuple(float(t) for t in np.percentile(times, (20, 50, 80)))  # type: ignore[return-value]


def report(rows: list[dict[str, Any]], errors: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Regret of adaptive, sums over the mixes by degree, and errors of the predictions."""
    samples = {row["mix"] for row in rows if row["mix"].startswith("sample")} or {r["mix"] for r in rows}
    print(
        f"\nsums over {len(samples)} mixes, ms; adaptive's gain, its regret over all, its parts (predicted)"
    )
    for window in args.windows:
        for cp in args.cp:
            here = [row for row in rows if row["window"] == window and row["cp"] == cp]
            sums = {
                kind: sum(r["ms"] for r in here if r["sharding"] == kind and r["mix"] in samples)
                for kind in FIXED
            }
            taken = [row for row in here if row["chosen"]]
            mine = [row for row in taken if row["mix"] in samples]
            total = sum(row["ms"] for row in mine)
            bound = sum(row["unsharded_ms"] for row in mine) / cp
            apart = sum(row["ms"] - row["exposed_ms"] for row in mine)
            regrets = [row["ms"] / min(r["ms"] for r in here if r["mix"] == row["mix"]) - 1 for row in taken]
            told = "  ".join(f"{kind} {ms:.2f}" for kind, ms in sums.items())
            print(
                f"{window:7} CP={cp}: {told}  adaptive {total:.2f}; {sums['per-sequence'] / total:.3f}x per-sequence, "
                f"{bound / apart:.1%} of unsharded / CP; regret mean {np.mean(regrets):.2%}, most {max(regrets):.2%}"
            )
            split = {
                part: sum(row[f"{part}_ms"] for row in mine)
                for part in ("ideal", "tile", "launch", "exchange", "imbalance")
            }
            print("          " + "  ".join(f"{part} {ms:.2f}" for part, ms in split.items()))
    wrong = np.array([abs(e["predicted_ms"] / e["measured_ms"] - 1) for e in errors])
    weights = np.array([e["measured_ms"] for e in errors])
    print(
        f"prediction of {len(wrong)} shares: error mean {wrong.mean():.1%}, p95 {np.percentile(wrong, 95):.1%}, "
        f"weighed by time {np.average(wrong, weights=weights):.1%}"
    )
