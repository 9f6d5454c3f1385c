"""A torch.profiler trace of one layer, forward and backward, over NCCL, and its costs by what they are for."""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from wlb_megatron.report.files import write_csv

PARTS = (
    ("diagonals and rectangles, forward", ("sdpa", "fprop", "flash_fwd")),
    ("diagonals and rectangles, backward", ("bprop", "dgrad", "flash_bwd", "dot_do_o", "convert_dq", "dq_")),
    ("exchange", ("nccl",)),
    ("gather of rows", ("index", "gather")),
    ("merge and add rows", ("_merge", "_add")),
    ("fills", ("memset", "fill")),
    ("copies", ("memcpy", "copy", "cat")),
    ("lengths and offsets", ("cu_seqlens",)),
    ("reductions of grouped heads", ("reduce", "sum")),
)


def profile(mixes: dict[str, list[int]], args: argparse.Namespace) -> None:
    """Trace of rank 0 (Chrome's format) and DIR/profile.csv. Under torchrun, one process a rank."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    from scripts.bench.attention.attention_bench import machine, measure, padded_to, tensors
    from scripts.bench.attention.attention_steps import sharded_step
    from wlb_megatron.attention.device_layout import device_layout
    from wlb_megatron.sharding.calls.attention_calls import attention_layout
    from wlb_megatron.sharding.select import shard

    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, cp = dist.get_rank(), dist.get_world_size()
    rows: list[dict[str, Any]] = []
    for name, documents in mixes.items():
        lengths = padded_to(documents, 16)
        plan = shard(lengths, cp, args.kinds[-1])
        layout = device_layout(attention_layout(plan, rank), "cuda")
        step, _ = sharded_step(layout, plan.packed_index(rank), tensors(int(lengths.sum())), dist.group.WORLD)
        wall = measure(step, agree=lambda count: 5)
        dist.barrier()
        with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            step()
            torch.cuda.synchronize()
        if rank == 0:
            path = args.out / f"trace_{name.replace(' ', '_').replace('+', '_')}.json"
            trace.export_chrome_trace(str(path))
            device, host = costs(json.loads(path.read_text())["traceEvents"])
            print(f"\n{name}, CP={cp}: {wall[1]:.2f} ms a layer, host {wall[3]:.2f} ms")
            for where, table in (("device", device), ("host", host)):
                for what, (us, count) in sorted(table.items(), key=lambda item: -item[1][0])[:14]:
                    print(f"  {where:7}{us:10.1f} us {count:5}x  {what[:90]}")
                    cost = {"mix": name, "where": where, "what": what, "us": us, "count": count}
                    rows.append(cost | {"wall_ms": wall[1], "host_ms": wall[3]} | machine())
            if path.stat().st_size > 12e6:
                path.unlink()
    if rank == 0:
        write_csv(args.out / "profile.csv", rows)
    dist.destroy_process_group()


def costs(events: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Microseconds and count of a trace's device kernels by part, and of its host operations by name, own time."""
    device: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    host: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        if event.get("ph") != "X":
            continue
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            add(device[part_of(event["name"])], event["dur"])
        elif event.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver"):
            add(host[event["name"]], event["dur"])
    return dict(device), dict(host)


def add(cell: list[float], duration: float) -> None:
    cell[0] += duration
    cell[1] += 1


def part_of(kernel: str) -> str:
    low = kernel.lower()
    backward = any(word in low for word in PARTS[1][1])
    for part, words in PARTS[1:] if backward else PARTS:
        if any(word in low for word in words):
            return part
    return f"other: {kernel[:60]}"


def draw(source: Path, target: Path) -> None:
    """From profile.csv, two bars a mix (matplotlib): kernels by part, and the exchange, which runs beside them on a
    stream of its own and counts there for as long as it waits for the other rank."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(source, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["where"] == "device"]
    mixes = list(dict.fromkeys(row["mix"] for row in rows))
    parts = list(dict.fromkeys(row["what"] for row in sorted(rows, key=lambda row: -float(row["us"]))))
    parts = sorted(parts, key=lambda part: part == "exchange")  # last
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.8 * len(mixes)))
    left = [0.0] * len(mixes)
    for part in [*parts[:8], "exchange"]:
        ms = [
            sum(float(r["us"]) for r in rows if (r["mix"], r["what"]) == (mix, part)) / 1e3 for mix in mixes
        ]
        aside = part == "exchange"
        rank = [i + (0.42 if aside else 0.0) for i in range(len(mixes))]
        name = "exchange and its waits, beside the kernels" if aside else part
        axes.barh(rank, ms, 0.4, left=None if aside else left, label=name, color="0.75" if aside else None)
        if not aside:
            left = [before + more for before, more in zip(left, ms, strict=True)]
    axes.set_yticks([i + 0.2 for i in range(len(mixes))], mixes)
    axes.set_xlabel("device time of one layer, forward + backward, while traced (ms)")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=3, fontsize=7, frameon=False)
    figure.savefig(target, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="draw profile.csv")
    parser.add_argument("csv", type=Path)
    parser.add_argument("png", type=Path)
    given = parser.parse_args()
    draw(given.csv, given.png)
