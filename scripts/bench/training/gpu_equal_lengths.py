"""What the plugin costs where it cannot gain: documents all as long as the window, against stock Megatron-LM.

python -m scripts.bench.training.gpu_equal_lengths --script ../Megatron-LM/pretrain_gpt.py --out out/equal

Pairs of runs, stock then plugin and plugin then stock in turn, each in fresh processes or, with --warm-ranks, in
processes of stock's and of the plugin's, which are on the GPUs all the time. At CP=1 a pair has one GPU, and as many
pairs run side by side as there are GPUs. A run's figure is the median of its step times (ms per token) after
--warm-up; a pair's is their ratio. Of n pairs the least and the greatest ratio hold the median with probability
1 - 2 / 2**n (five: 94 %). Stock needs no document mask here: its windows are the documents, to within a token.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from scripts.bench.attention.fa4.te_windows import ASKED
from scripts.bench.training.gpu_train import ROOT, STOCK, WLB, add_warm_ranks, corpus, run, warm_ranks
from scripts.bench.training.step_trace import compare
from wlb_megatron.report.files import write_csv

FLAGS = {"stock": STOCK, "wlb": WLB}
KERNELS = {
    "cudnn": {"stock": ["--attention-backend", "fused"], "wlb": ["--wlb-kernels", "cudnn"]},
    "fa4": {"stock": ["--attention-backend", "flash"], "wlb": ["--wlb-kernels", "fa4"]},
}
"""The flags that choose the kernels of each: where FlashAttention-4 is installed alone, stock's flash means it.
Its windows are corrected for stock (te_windows.py): as Transformer Engine 2.20.2 calls it, it attends to no key."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--script", type=Path, required=True, help="Megatron-LM's pretrain_gpt.py")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "equal", help="folder of results")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--degrees", type=int, nargs="+", default=[1, 2], help="context-parallel sizes, each on as many GPUs"
    )
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=6, help="iterations left out of the times")
    parser.add_argument("--seq-length", type=int, default=32768, help="window, and every document (tokens)")
    parser.add_argument("--global-batch-size", type=int, default=4, help="windows a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kernels", choices=tuple(KERNELS), default="cudnn", help="of both")
    parser.add_argument("--extra", default="", help="further flags for every run")
    parser.add_argument(
        "--trace", action="store_true", help="one pair more, in Megatron's profiler: where its time goes"
    )
    add_warm_ranks(parser)
    options = parser.parse_args()
    if options.kernels == "fa4":
        if not options.warm_ranks:
            parser.error("--kernels fa4 needs --warm-ranks, whose processes correct stock's windows")
        os.environ[ASKED] = "1"
    options.out.mkdir(parents=True, exist_ok=True)
    lengths = options.out / "lengths.npy"
    np.save(lengths, np.full(4096, options.seq_length))
    prefix = corpus(options.out / "corpus", lengths)
    if options.warm_ranks:
        start_all(options.degrees)
    rows: list[dict[str, Any]] = []
    for degree in options.degrees:
        beside = torch.cuda.device_count() if degree == 1 else 1
        with ThreadPoolExecutor(beside) as pool:
            series = partial(pairs_of, degree, beside=beside, prefix=prefix, options=options)
            rows += [row for pairs in pool.map(series, range(beside)) for row in pairs]
        write_csv(options.out / "pairs.csv", rows)
    for degree in options.degrees:
        report(degree, [row for row in rows if row["cp"] == degree])
        if options.trace:
            compare({which: traced(which, degree, prefix, options) for which in FLAGS})


def flags_of(which: str, options: argparse.Namespace) -> list[str]:
    return [*FLAGS[which], *KERNELS[options.kernels][which]]


def start_all(degrees: list[int]) -> None:
    """Have the processes of all degrees import at once."""
    for degree in degrees:
        for gpu in range(torch.cuda.device_count() if degree == 1 else 1):
            seen = {"CUDA_VISIBLE_DEVICES": str(gpu)} if degree == 1 else {}
            for which in FLAGS:
                warm_ranks(degree, {**os.environ, **seen}, stock=which == "stock").start()


def pairs_of(
    degree: int, first: int, beside: int, prefix: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Pairs first, first + beside, ..: at CP=1 all on the GPU of that number."""
    rows = []
    for pair in range(first, options.pairs, beside):
        order = ("stock", "wlb") if (pair + pair // beside) % 2 == 0 else ("wlb", "stock")
        seen = {"CUDA_VISIBLE_DEVICES": str(first)} if degree == 1 else {}
        figures = one_pair(degree, pair, order, seen, prefix, options)
        rows.append(
            {"kernels": options.kernels, "cp": degree, "pair": pair, "gpu": first if degree == 1 else "all"}
            | figures
        )
        print(
            f"CP={degree}, pair {pair}: stock {figures['stock_ms']:.1f} ms, plugin {figures['wlb_ms']:.1f} ms a step, "
            f"ratio per token {figures['ratio']:.4f}",
            flush=True,
        )
    return rows


def one_pair(
    degree: int,
    pair: int,
    order: tuple[str, str],
    seen: dict[str, str],
    prefix: Path,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Step times, tokens a step and peak memory of both, and their ratio (plugin over stock, ms per token)."""
    figures: dict[str, Any] = {}
    for which in order:
        flags = [*flags_of(which, options), "--context-parallel-size", str(degree)]
        steps = run(f"{which}-cp{degree}-{pair}", degree, flags, prefix, options, seen)
        timed = steps[options.warm_up :]
        if not timed:
            raise SystemExit(f"{which} at CP={degree} gave no step times: see its log in {options.out}")
        figures[f"{which}_ms"] = median(step["ms"] for step in timed)
        figures[f"{which}_ns_a_token"] = median(1e6 * step["ms"] / step["tokens"] for step in timed)
        figures[f"{which}_peak_mb"] = timed[-1]["peak_mb"]
    return figures | {"ratio": figures["wlb_ns_a_token"] / figures["stock_ns_a_token"]}


def traced(which: str, degree: int, prefix: Path, options: argparse.Namespace) -> Path:
    """Rank 0's trace of the last three steps."""
    folder = options.out / f"{which}-cp{degree}"
    last = options.iterations - 1
    flags = ["--profile", "--use-pytorch-profiler", "--profile-step-start", str(last - 3)]
    flags += ["--profile-step-end", str(last), "--tensorboard-dir", str(folder / "tensorboard")]
    flags += ["--context-parallel-size", str(degree), *flags_of(which, options)]
    seen = {} if degree > 1 else {"CUDA_VISIBLE_DEVICES": "0"}
    run(f"{which}-cp{degree}-traced", degree, flags, prefix, options, seen)
    return folder / "torch_profile" / "rank-0.json.gz"


def report(degree: int, rows: list[dict[str, Any]]) -> None:
    ratios = sorted(row["ratio"] for row in rows)
    sure, kernels = 1 - 2 / 2 ** len(ratios), rows[0]["kernels"]
    print(
        f"{kernels}, CP={degree}: plugin / stock, {len(ratios)} pairs: median {median(ratios):.4f}, between "
        f"{ratios[0]:.4f} and {ratios[-1]:.4f} ({sure:.0%}); "
        f"peak MB {rows[0]['stock_peak_mb']:.0f} stock, {rows[0]['wlb_peak_mb']:.0f} plugin"
    )


if __name__ == "__main__":
    main()
