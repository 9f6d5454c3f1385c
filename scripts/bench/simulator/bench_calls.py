"""Predicted attention time of micro-batches in one bottom-right call on each rank, beside diagonals and rectangles.

    python -m scripts.bench.simulator.bench_calls --mixes mixes.json [more.json] [--windows 8192 ..] \\
        [--cp 2 4 8] [--out DIR]

mixes.json: {"name": [document lengths], ...}, of any window: lengths are scaled to each. Times are predicted by the
built-in H100 table (8 query heads, 2 KV heads, d=128), forward + backward, slowest rank; only mixes that are cut count.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from wlb_megatron.report.files import write_csv
from wlb_megatron.sharding.alignment import padded
from wlb_megatron.sharding.calls.one_call import in_fewest_calls
from wlb_megatron.sharding.predict import in_one_call, in_two_calls
from wlb_megatron.sharding.segments import IntArray
from wlb_megatron.sharding.select import shard
from wlb_megatron.workload.kernel_table import h100


def scaled(lengths: list[int], window: int, multiple: int) -> IntArray:
    tokens = [max(1, n * window // sum(lengths)) for n in lengths]
    return padded(tokens, multiple)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixes", type=Path, nargs="+", required=True)
    parser.add_argument("--windows", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=["hybrid", "per-document"])
    parser.add_argument("--out", type=Path, help="write one_call.csv there")
    args = parser.parse_args()
    mixes: dict[str, list[int]] = {}
    for path in args.mixes:
        mixes |= json.loads(path.read_text())
    table, rows = h100(), []
    print("one call / two calls, predicted        p10    p50    p90   one call chosen, saved where it is")
    for window in args.windows:
        for cp in args.cp:
            for kind in args.kinds:
                plans = [shard(scaled(lengths, window, 16 * cp), cp, kind) for lengths in mixes.values()]
                cut = [plan for plan in plans if any((segments[:, 1] > 0).any() for segments in plan.ranks)]
                if not cut:
                    continue
                both = np.array([predict(cut, table).max(axis=1) for predict in (in_two_calls, in_one_call)])
                ratio = both[1] / both[0]
                taken = np.array([plan.one_call for plan in in_fewest_calls(cut, table)])
                saved = 1 - ratio[taken].mean() if taken.any() else 0.0
                low, middle, high = np.percentile(ratio, (10, 50, 90))
                print(
                    f"window {window:7} CP={cp} {kind:14}{low:7.3f}{middle:7.3f}{high:7.3f}"
                    f"   {taken.sum():3} of {len(cut):3}   {saved:6.1%}"
                )
                rows.append([window, cp, kind, len(cut), low, middle, high, int(taken.sum()), saved])
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        columns = ("window", "cp", "sharding", "mixes_cut", "p10", "p50", "p90", "chosen", "saved")
        write_csv(args.out / "one_call.csv", [dict(zip(columns, figures, strict=True)) for figures in rows])


if __name__ == "__main__":
    main()
