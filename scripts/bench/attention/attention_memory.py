"""Memory and time of keeping exchanged keys for backward, against exchanging them again there."""

from __future__ import annotations

import argparse

import torch

from scripts.bench.attention.attention_bench import machine, measure, tensors
from scripts.bench.attention.attention_steps import Mixes, Way, padded_to, share
from wlb_megatron.report.files import write_csv
from wlb_megatron.sharding.select import shard

LAYERS = 4


def memory(mixes: Mixes, args: argparse.Namespace) -> None:
    """Bytes that a layer saves for backward, the peak above them, and its time with copies; of the neediest rank."""
    rows = []
    print(
        f"{'mix':16}{'cp':>3}{'sharding':>14}  {'keys':10}{'saved MiB':>10}{'peak MiB':>10}{'ms a layer':>12}"
    )
    for name, documents in mixes.items():
        lengths = padded_to(documents, 16)
        x = tensors(int(lengths.sum()))
        kv = torch.stack((x.k, x.v), dim=1)
        for cp in args.cp:
            for kind in args.kinds:
                plan = shard(lengths, cp, kind)
                for keep in (True, False):
                    worst = (0.0, 0.0, 0.0)
                    for rank in range(cp):
                        step = share(plan, rank, x, kv, Way(keep_keys=keep))[0]
                        step()
                        saved, peak = bytes_of(step)
                        worst = tuple(map(max, worst, (saved, peak, measure(step, most=5)[1])))
                    keys = "kept" if keep else "again"
                    print(
                        f"{name:16}{cp:3}{kind:>14}  {keys:10}{worst[0]:10.1f}{worst[1]:10.1f}{worst[2]:12.3f}",
                        flush=True,
                    )
                    rows.append(
                        {"mix": name, "cp": cp, "sharding": kind, "keys": keys}
                        | dict(zip(("saved_mib", "peak_mib", "ms"), worst, strict=True))
                        | machine()
                    )
    write_csv(args.out / "memory.csv", rows)


def bytes_of(step: object) -> tuple[float, float]:
    """MiB that one more layer saves (from 1 and LAYERS layers), and the most in use above the inputs with one layer."""
    peaks = []
    for layers in (1, LAYERS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(layers)  # type: ignore[operator]
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
    return (peaks[1] - peaks[0]) / (LAYERS - 1), peaks[0]
