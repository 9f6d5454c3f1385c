"""Does memory fragment where lengths vary without end? Some hundred steps, with expandable segments and without.

python -m scripts.bench.training.gpu_allocator --iterations 200 --out out/allocator

One run a setting of torch's allocator, in a process of its own on one GPU. Lengths are long-tailed. Prints and writes
(allocator.csv) memory held by tensors and by the allocator at most (GB), what it held in the middle and at the end, how
often it had to give memory back and ask anew, and the median step of each half (ms).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scripts.bench.training.gpu_train import MODEL, STEP, TRAINING, corpus
from scripts.environment import ROOT, cpu_environment
from scripts.megatron_job import MACHINE
from scripts.warm_ranks import WarmRanks
from wlb_megatron.documents.synthetic import paper_like
from wlb_megatron.report.files import write_csv

SETTINGS = {"default": "", "expandable segments": "expandable_segments:True"}
TINY = f"{MACHINE} --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "allocator", help="folder of results")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seq-length", type=int, default=32768, help="window (tokens)")
    parser.add_argument("--global-batch-size", type=int, default=2, help="windows a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=150, help="seconds after which a run is given up")
    parser.add_argument("--extra", default="", help="further flags for every run")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="cpu: a tiny model, to try it"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lengths = options.out / "lengths.npy"
    np.save(lengths, paper_like(20_000, 0, options.seq_length))
    prefix = corpus(options.out / "corpus", lengths)
    rows = []
    for name, setting in SETTINGS.items():
        rows += [row] if (row := run(name, setting, prefix, options)) else []
        write_csv(options.out / "allocator.csv", rows)
    if len(rows) < len(SETTINGS):
        raise SystemExit(1)


def run(name: str, setting: str, prefix: Path, options: argparse.Namespace) -> dict[str, Any] | None:
    """One row; None where the run failed."""
    result, log = (options.out / f"{name.split()[0]}{end}" for end in (".json", ".log"))
    flags = [
        *(MODEL.split() + TRAINING.split()),
        *("--num-layers", str(options.layers), "--data-path", str(prefix), "--split", "1,0,0"),
        *("--seq-length", str(options.seq_length), "--max-position-embeddings", str(2 * options.seq_length)),
        *("--global-batch-size", str(options.global_batch_size), "--train-iters", str(options.iterations)),
        *(TINY.split() if options.device == "cpu" else []),
        *options.extra.split(),
    ]
    environment = cpu_environment() if options.device == "cpu" else {**os.environ, "PYTHONWARNINGS": "ignore"}
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": setting}
    ranks = WarmRanks(1, environment)
    try:
        job = ["scripts.bench.training.allocator_run", str(result), *flags]
        failed = ranks.run("module", job, log, options.limit)
    finally:
        ranks.close()
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    if failed:
        print(f"{name}: failed\n{text[-2000:]}")
        return None
    figures = json.loads(result.read_text(encoding="utf-8"))
    times = [float(step[2]) for step in STEP.finditer(text)]
    reserved, half = figures["reserved"], len(times) // 2
    row = {
        "setting": name,
        "iterations": len(times),
        "allocated_peak_gb": round(figures["allocated_peak"] / 1e9, 2),
        "reserved_peak_gb": round(figures["reserved_peak"] / 1e9, 2),
        "reserved_in_the_middle_gb": round(reserved[len(reserved) // 2] / 1e9, 2),
        "reserved_at_the_end_gb": round(reserved[-1] / 1e9, 2),
        "retries": figures["retries"],
        "first_half_ms": round(median(times[:half]), 1),
        "second_half_ms": round(median(times[half:]), 1),
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
