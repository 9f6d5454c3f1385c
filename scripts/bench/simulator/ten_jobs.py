"""What `analyze` finds for ten jobs, three with experts, on seeded long-tailed lengths. All figures are simulated.

python -m scripts.bench.simulator.ten_jobs --out DIR [--jobs llama3-8b-64K ..]
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from scripts.bench.start import new_parser
from scripts.csv_files import write_csv
from wlb_megatron.cli import main as wlb_megatron
from wlb_megatron.documents.lengths import long_tailed

JOBS = {
    "7B-128K": "--model 7B --tp 4 --cp 4 --pp 4 --micro-batches 4",
    "llama3-8b-32K": "--model llama3-8b --tp 4 --pp 2 --dp 2 --micro-batches 8",
    "llama3-8b-64K": "--model llama3-8b --tp 2 --cp 2 --pp 2 --dp 2 --micro-batches 8 --recompute full",
    "qwen3-8b-64K": "--model qwen3-8b --tp 2 --cp 2 --pp 4 --dp 2 --micro-batches 8 --recompute full",
    "llama3-70b-64K": "--model llama3-70b --tp 8 --cp 2 --pp 4 --dp 2 --micro-batches 8 --recompute full",
    "llama3-70b-128K": "--model llama3-70b --tp 8 --cp 4 --pp 4 --dp 2 --micro-batches 8 --recompute full",
    "llama3-405b-64K": "--model llama3-405b --tp 8 --cp 4 --pp 16 --micro-batches 16 --recompute full",
    "qwen3-30b-a3b-128K": "--model qwen3-30b-a3b --tp 2 --cp 4 --pp 4 --dp 2 --micro-batches 4 "
    "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --recompute full",
    "mixtral-8x22b-64K": "--model mixtral-8x22b --tp 4 --cp 2 --pp 4 --dp 2 --micro-batches 8 "
    "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --recompute full",
    "deepseek-v3-64K": "--model deepseek-v3 --tp 8 --cp 2 --pp 9 --dp 4 --micro-batches 16 "
    "--expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --recompute full",
}
"""Flags by name; the name ends in the window."""


def analyzed(name: str, folder: Path) -> dict[str, object]:
    window = int(name.rpartition("-")[2].removesuffix("K")) * 1024
    lengths, report = folder / f"{window}.npy", folder / "shown.json"
    np.save(lengths, long_tailed(window, 100_000))
    words = f"analyze --no-split --lengths {lengths} --window {window} --iterations 24 --json {report} {JOBS[name]}"
    if wlb_megatron(words.split()):
        raise SystemExit(f"{name}: analyze failed")
    shown = json.loads(report.read_text(encoding="utf-8"))
    found, after = shown["search"], shown["results"]["after"]
    best = found["best"][0] if found["best"] else found["given"]
    return {
        "job": name,
        "gpus": shown["gpus"],
        "chunks": after["documents_in_chunks"]["max"] > 0,
        "over_arrival_order": round(shown["predicted_speedup"], 3),
        "tokens_per_second": round(after["tokens_per_second"]),
        "memory_gib": round(shown["memory_gib"], 1),
        "slowest_ms": round(after["step_ms"]["max"]),
        "best_over_as_set": round(best["tokens_per_second"] / found["given"]["tokens_per_second"], 3),
        "best_memory_gib": round(best["memory_gib"], 1),
        "best_slowest_ms": round(best["slowest_ms"]),
        "best_flags": best["flags"] or "as given",
        "why": best["why"],
    }


def main() -> None:
    parser = new_parser(__doc__, "ten_jobs")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.jobs:
            rows.append(analyzed(name, Path(folder)))
            print(rows[-1], flush=True)
            write_csv(args.out / "ten_jobs.csv", rows)


if __name__ == "__main__":
    main()
