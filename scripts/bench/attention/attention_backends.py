"""One layer's attention over NCCL by cuDNN's and by FlashAttention-4's kernels, beside Transformer Engine's own.

A process a rank. Ours is what adaptive takes by each backend's kernel table, one call or two. Transformer Engine's p2p
and all-gather run on cuDNN, as they do where nothing else is asked for; its p2p on FlashAttention-4, too, with its
windows corrected (te_windows.py).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scripts.bench.attention.attention_bench import (
    KERNELS,
    Step,
    machine,
    measure,
    padded_to,
    te_context_parallel,
    tensors,
    timing,
)
from scripts.bench.attention.attention_choice import kernel_table
from scripts.bench.attention.attention_steps import Mixes, sharded_step
from scripts.bench.attention.fa4.te_windows import correct_windows
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.report.files import write_csv
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.calls.one_call import in_fewest_calls
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard

TE = ("TE p2p", "TE all_gather")
WAYS = ("ours, cudnn", "ours, fa4", *TE)
TRIED_LAST = ("TE p2p, fa4",)


def backends(mixes: Mixes, args: argparse.Namespace) -> None:
    """DIR/backends.csv: wall ms of the slower rank, its host's, and the peak of memory of the hungrier one."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, cp, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    say = print if rank == 0 else lambda *a, **k: None
    until = time.perf_counter() + args.seconds
    correct_windows()
    tables = {}
    for name in ("cudnn", "fa4"):
        KERNELS.use(name)
        tables[name] = kernel_table(args.profile_of if name == "fa4" else None)

    def agree(count: int) -> int:
        least = torch.tensor(count, device="cuda")
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def made(way: str, lengths: np.ndarray) -> tuple[Step, ShardPlan | None]:
        whose, *kernels = way.split(", ")
        KERNELS.use(kernels[0] if kernels else "cudnn")
        if whose != "ours":
            return te_context_parallel(whose.removeprefix("TE "), lengths, group, KERNELS.name), None
        table = tables[KERNELS.name]
        (plan,) = in_fewest_calls([shard(lengths, cp, "adaptive", table)], table)
        layout = device_layout(attention_layout(plan, rank), "cuda")
        x = tensors(int(lengths.sum()))
        return sharded_step(layout, plan.packed_index(rank), x, group)[0], plan

    rows: list[dict[str, Any]] = []
    broken: set[str] = set()
    # What may fail or hang comes after all else is measured and written, unless ways are named.
    groups = [tuple(args.ways)] if args.ways else [WAYS, TRIED_LAST]
    for ways, (mix, documents) in product(groups, mixes.items()):
        if agree(int(time.perf_counter() < until)) == 0:
            say(f"{mix}: no more time")
            break
        lengths, line = padded_to(documents, 16), f"{mix:16}"
        for way in ways:
            if way in broken:
                continue
            torch.cuda.reset_peak_memory_stats()
            before, failed = torch.cuda.memory_allocated(), ""
            try:
                step, plan = made(way, lengths)
                step()
            except Exception as error:
                failed = f"{type(error).__name__}: {str(error)[:400]}"
            if agree(int(not failed)) == 0:
                say(f"{way} does not run: {failed or 'on another rank'}", flush=True)
                broken.add(way)
                continue
            times = measure(step, agree, most=11, seconds=0.12)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            slowest_of_ranks = torch.tensor([*times, peak], device="cuda")
            dist.all_reduce(slowest_of_ranks, dist.ReduceOp.MAX)
            *slowest, peak = slowest_of_ranks.tolist()
            calls = "" if plan is None else 1 if plan.one_call else 2
            rows.append(timing(mix, cp, way, -1, slowest, machine()) | {"calls": calls, "peak_mib": peak})
            line += f"  {way} {slowest[1]:.2f} ({slowest[3]:.2f})"
        if broken.issuperset(ways):
            break
        say(line, flush=True)
        if rank == 0:
            write_csv(args.out / "backends.csv", rows)
    _gains(rows, say)
    dist.destroy_process_group()


def _gains(rows: list[dict[str, Any]], say: Callable[..., Any]) -> None:
    took = {(row["mix"], row["attention"]): row["p50_ms"] for row in rows}
    mixes = list(dict.fromkeys(row["mix"] for row in rows))
    samples = [mix for mix in mixes if mix.startswith("sample")]
    for few, only in (("all", mixes), ("samples", samples)):
        for ours, theirs in (*((ours, TE) for ours in WAYS[:2]), (WAYS[1], TRIED_LAST)):
            best = {m: min((took[m, te] for te in theirs if (m, te) in took), default=None) for m in only}
            gains = {m: ms / took[m, ours] for m, ms in best.items() if ms is not None and (m, ours) in took}
            if gains:
                mean = float(np.exp(np.mean(np.log(list(gains.values())))))
                least = min(gains, key=lambda m: gains[m])
                say(
                    f"{few} ({len(gains)}): {ours} {mean:.3f}x {' or '.join(theirs)}, the faster; least "
                    f"{gains[least]:.3f} ({least})"
                )
