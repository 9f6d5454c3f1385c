"""Every sharding's slowest rank over windows, degrees and mixes; what adaptive chose, and what that cost; predictions.

Each rank's share runs alone on one GPU, its copies for the exchange included; what would be seen of the transfer is
added as the kernel table has it (measured between two GPUs). Windows below that of the mixes shrink every document.
A way that is predicted to take 15 % longer than the best is not run. One call instead of two is a way of its own
(with cuDNN's kernels where it is predicted to be faster).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.bench.attention.attention_bench import (
    DIM,
    HEADS,
    KERNELS,
    KV_HEADS,
    machine,
    padded_to,
    te_attention,
    tensors,
)
from scripts.bench.attention.attention_regret import report
from scripts.bench.attention.attention_steps import Mixes, share
from wlb_megatron.report.files import write_csv
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.calls.one_call import in_fewest_calls
from wlb_megatron.sharding.predict import predict
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard
from wlb_megatron.workload.kernel_table import KernelTable, of_gpu
from wlb_megatron.workload.profile import read_profile

FIXED = ("per-sequence", "per-document", "hybrid")
IDEAL_FLOPS = 510e12
"""Rate of a top-left causal call on one long document, forward + backward, on one H100."""

HOPELESS = 1.15
"""A way predicted to take so many times the best one's time is not run."""

HOST_BOUND_MS, PAUSE_CYCLES = 6.0, 4_000_000
"""Steps below this may wait for the host, which needs 1 to 2 ms to launch one; the pause is about 2 ms for each."""

SPREAD, ROUNDS = 1.15, 4
"""p80 over p20 of short steps above which they are measured again, behind a longer pause, and how often."""


def choice(mixes: Mixes, args: argparse.Namespace) -> None:
    """Rows of DIR/choice_KERNELS.csv. After args.seconds no further mix is begun."""
    until, table = time.perf_counter() + args.seconds, kernel_table(args.profile_of)
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    whole_window = max(sum(lengths) for lengths in mixes.values())
    for window in args.windows:
        for name, documents in mixes.items():
            if time.perf_counter() > until:
                print(f"{window} {name}: no more time")
                break
            rows += one_mix(name, documents, window, whole_window, args.cp, table, errors)
            stem = f"choice_{KERNELS.name}" + (f"_{window}" if len(args.windows) == 1 else "")
            write_csv(args.out / f"{stem}.csv", rows)
            write_csv(args.out / f"{stem}_predicted.csv", errors)
    report(rows, errors, args.windows, args.cp, KERNELS.name)


def one_mix(
    name: str,
    documents: list[int],
    window: int,
    whole_window: int,
    degrees: list[int],
    table: KernelTable,
    errors: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Rows of one mix, its documents shrunk from whole_window to window tokens; each share's prediction to errors."""
    lengths = padded_to([max(1, n * window // whole_window) for n in documents], 16)
    x = tensors(int(lengths.sum()))
    kv = torch.stack((x.k, x.v), dim=1)
    alone = timed(share(shard(lengths, 1, "per-document"), 0, x, kv)[0])[1]
    unsharded = timed(te_attention(lengths, x))[1] if KERNELS.name == "cudnn" else alone
    rows = []
    for cp in degrees:
        rows += degree(lengths, cp, x, kv, table, (unsharded, alone), errors, name, window)
    line = "  ".join(
        f"CP={row['cp']} {row['sharding']}{', one call' * (row['calls'] == 1)} {row['ms']:.2f}"
        for row in rows
        if row["chosen"]
    )
    print(f"{window:7} {name:14} {KERNELS.name:6} unsharded {unsharded:8.2f}  chosen: {line}", flush=True)
    return rows


def kernel_table(profile_of: Path | None) -> KernelTable:
    """Of a profile, if one is given, with the exchange as it was measured between two GPUs; else the built-in one."""
    built_in = of_gpu(torch.cuda.get_device_name(), KERNELS.name)
    if not profile_of:
        return built_in
    table = read_profile(profile_of).costs.table
    table = table.scaled(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    return replace(table, exchange=built_in.exchange, exchange_row=built_in.exchange_row)


def degree(
    lengths: np.ndarray,
    cp: int,
    x: Any,
    kv: torch.Tensor,
    table: KernelTable,
    unsharded: tuple[float, float],
    errors: list[dict[str, Any]],
    name: str,
    window: int,
) -> list[dict[str, Any]]:
    """A row for each way that is run at one degree; the one whose plan adaptive takes is marked."""
    (adaptive,) = in_fewest_calls([shard(lengths, cp, "adaptive", table)], table)
    ways = [replace(shard(lengths, cp, kind, table), kind=kind) for kind in FIXED]
    if table.backend != "cudnn" or adaptive.one_call:
        cut = [plan for plan in ways if any(bool((rows[:, 1] > 0).any()) for rows in plan.ranks)]
        ways += [replace(plan, one_call=True) for plan in cut]
    predicted = [predict(plan, table).max() for plan in ways]
    measured: dict[bytes, tuple[list[Any], np.ndarray]] = {}
    rows, chosen = [], False
    for plan, expected in zip(ways, predicted, strict=True):
        key = identity(plan)
        if expected > HOPELESS * min(predicted) and key != identity(adaptive):
            continue
        if key not in measured:
            times = [timed(share(plan, rank, x, kv)[0]) for rank in range(cp)]
            kernels = predict(plan, replace(table, exchange=0.0, exchange_row=0.0)) / 1e6
            measured[key] = times, kernels
            busy = any(attention_layout(plan, rank).rectangles is not None for rank in range(cp))
            errors += [
                {"window": window, "mix": name, "cp": cp, "rank": rank}
                | {"calls": 1 if plan.one_call or not busy else 2}
                | {
                    "predicted_ms": float(kernels[rank]),
                    "measured_ms": times[rank][1],
                    "kernels": KERNELS.name,
                }
                for rank in range(cp)
            ]
        times, kernels = measured[key]
        exposed = predict(plan, table) / 1e6 - kernels
        slowest = max(range(cp), key=lambda rank: times[rank][1] + exposed[rank])
        p20, p50, p80 = (float(t + exposed[slowest]) for t in times[slowest])
        taken = not chosen and key == identity(adaptive)
        chosen |= taken
        rows.append(
            {
                "window": window,
                "mix": name,
                "cp": cp,
                "sharding": plan.kind,
                "calls": 1 if plan.one_call else 2,
            }
            | {"chosen": int(taken), "ms": p50, "p20_ms": p20, "p80_ms": p80}
            | {"exposed_ms": float(exposed[slowest]), "predicted_ms": float((kernels + exposed).max())}
            | {"unsharded_ms": unsharded[0], "unsharded_own_ms": unsharded[1]}
            | parts(plan, lengths, table)
            | machine()
        )
    assert chosen, "adaptive took a plan that is none of the ways"
    return rows


def identity(plan: ShardPlan) -> bytes:
    return b"|".join([bytes([plan.one_call]), *(rows.tobytes() for rows in plan.ranks)])


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
    predicted, alone, kernels = (predict(plan, t) / 1e6 for t in (table, still, bare))
    pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum())
    ideal = 3.5 * 4 * table.heads * table.head_dim * pairs / IDEAL_FLOPS * 1e3 / plan.cp_size
    return {
        "ideal_ms": ideal,
        "tile_ms": float(kernels.mean()) - ideal,
        "launch_ms": float((alone - kernels).mean()),
        "exchange_ms": float((predicted - alone).mean()),
        "imbalance_ms": float(predicted.max() - predicted.mean()),
    }


def timed(step: Any, most: int = 4, seconds: float = 0.06) -> tuple[float, float, float]:
    """p20, p50, p80 of GPU ms, of 2 to `most` steps after one, or two; the first one may build a kernel's graph.

    Short steps are queued behind a pause, so that the device never waits for the host: in a model other work would
    fill that time. Where they differ by more than SPREAD all the same, the host was late: they are run again.
    """
    step()
    torch.cuda.synchronize()
    (first,) = intervals(step, 1)
    count = max(2, min(most, int(seconds * 1e3 / max(first, 1e-3))))
    if first >= HOST_BOUND_MS:
        times = intervals(step, count)
        return _percentiles([*times, first] if count == 2 else times)
    rounds = []
    for longer in range(1, ROUNDS + 1):
        torch.cuda._sleep(PAUSE_CYCLES * count * longer)
        rounds.append(_percentiles(intervals(step, count)))
        if rounds[-1][2] <= SPREAD * rounds[-1][0]:
            break
    return min(rounds, key=lambda round_: round_[2] / round_[0])


def intervals(step: Any, count: int) -> list[float]:
    """GPU ms of each of `count` steps, after what is queued."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def _percentiles(times: list[float]) -> tuple[float, float, float]:
    return tuple(float(t) for t in np.percentile(times, (20, 50, 80)))  # type: ignore[return-value]
