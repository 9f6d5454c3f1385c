"""The attention benchmark over NCCL, a process a rank, beside Transformer Engine's own context parallelism."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scripts.bench.attention.attention_bench import (
    Step,
    errors,
    machine,
    measure,
    padded_to,
    reference,
    te_attention,
    te_context_parallel,
    tensors,
    timing,
)
from scripts.bench.attention.attention_steps import (
    ErrorTable,
    Mixes,
    Way,
    checked_lengths,
    planned,
    sharded_step,
    swapped,
)
from scripts.csv_files import write_csv
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.segments import ShardPlan


class NothingTravels:
    """An all-to-all whose rows are there already: random ones, since zeros let the device clock higher."""

    def __init__(self) -> None:
        self.rows: dict[torch.Size, Tensor] = {}

    def __call__(self, sent: Tensor, send_counts: Any, recv_counts: Any, *_: Any) -> tuple[Tensor, Any]:
        shape = torch.Size((sum(recv_counts), *sent.shape[1:]))
        if shape not in self.rows:
            self.rows[shape] = torch.randn(shape, device=sent.device, dtype=sent.dtype)
        return self.rows[shape], SimpleNamespace(wait=lambda: None)


def real(mixes: Mixes, args: argparse.Namespace) -> None:
    """Every rank in its own process over NCCL."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, cp, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    say = print if rank == 0 else lambda *a, **k: None

    def ours(plan: ShardPlan, x: SimpleNamespace, keep_keys: bool = True) -> tuple[Step, Tensor]:
        layout = device_layout(attention_layout(plan, rank), "cuda")
        return sharded_step(layout, plan.packed_index(rank), x, group, Way(keep_keys=keep_keys))

    def first(*inputs: Any) -> Step:
        return ours(*inputs)[0]

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
                step, index = ours(planned(lengths, cp, kind), x, keep_keys)
                pairs = zip(step(), expected, strict=True)
                squares = torch.stack([(a.detach().float() - b[index]).square().sum() for a, b in pairs])
                dist.all_reduce(squares)
                error = [float(s.sqrt() / b.norm()) for s, b in zip(squares, expected, strict=True)]
                table.add(name, kind + ("" if keep_keys else ", keys again"), cp, error, base)
    if rank == 0 and table.rows:
        write_csv(args.out / "real_errors.csv", table.rows)

    def agree(count: int) -> int:
        least = torch.tensor(count, device="cuda")
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    rows: list[dict[str, Any]] = []
    stamp = machine()
    say(f"\n{'mix':16}wall ms a layer, slowest rank's p50 (host ms)", flush=True)
    for name, documents in mixes.items():
        lengths = padded_to(documents, 16)
        x = tensors(int(lengths.sum()))
        steps: dict[str, Callable[[], Step]] = {
            "TE p2p": partial(te_context_parallel, "p2p", lengths, group),
            "TE all_gather": partial(te_context_parallel, "all_gather", lengths, group),
        }
        for kind in args.kinds:
            plan = planned(lengths, cp, kind)
            steps[kind] = partial(first, plan, x)
        # Of the last kind: keys exchanged again in backward; and with nothing travelling, so that the
        # difference is what is seen of the transfer.
        step = ours(plan, x)[0]
        steps[args.kinds[-1] + ", keys again"] = partial(first, plan, x, False)
        still = NothingTravels()
        steps[args.kinds[-1] + ", no transfer"] = partial(partial, swapped, still, step)
        line = f"{name:16}"
        for kind, make in steps.items():
            times = torch.tensor(measure(make(), agree, most=11), device="cuda")
            dist.all_reduce(times, dist.ReduceOp.MAX)
            rows.append(timing(name, cp, kind, -1, times.tolist(), stamp))
            line += f"  {kind} {times[1]:.2f} ({times[3]:.2f})"
        say(line, flush=True)
        if rank == 0:
            write_csv(args.out / "real.csv", rows)
    gains(rows, args.kinds, say)
    dist.destroy_process_group()


def gains(rows: list[dict[str, Any]], kinds: list[str], say: Callable[..., Any]) -> None:
    took = {(row["mix"], row["attention"]): row["p50_ms"] for row in rows}
    mixes = list(dict.fromkeys(row["mix"] for row in rows))
    for kind in kinds:
        of_mixes = [min(took[m, "TE p2p"], took[m, "TE all_gather"]) / took[m, kind] for m in mixes]
        mean = float(np.exp(np.mean(np.log(of_mixes))))
        say(
            f"{kind}: {mean:.3f}x the faster of TE's, geometric mean of {len(of_mixes)} (least {min(of_mixes):.3f}x)"
        )
    seen = [1 - took[m, kinds[-1] + ", no transfer"] / took[m, kinds[-1]] for m in mixes]
    say(f"{kinds[-1]}: transfer seen, share of the layer: median {np.median(seen):.1%}, most {max(seen):.1%}")
