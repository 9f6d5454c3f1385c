"""Does a step that keeps as many layers as fit ever run out of memory? Many steps of mixed lengths on capped GPUs.

python -m scripts.bench.training.gpu_memory_cap --cases dense:80:300,experts:60:100 --lengths LENGTHS.npy --out out/cap

A case is KIND:GB:STEPS. dense: PP=2, 56 layers of 1024, one micro-batch a window, so that micro-batches are long.
experts: EP=2 over DP=2, 16 layers of 8 experts, 2 for a token. Layers are small, so that a step takes a second and
yet fills the memory. Each rank's torch may reserve GB x 10^9 bytes. Printed: steps trained, the share of layers
recomputed, and the peak over what was available, planned and measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.bench.start import MODEL, TRAINING, add_corpus, corpus, environment, new_parser, torchrun
from wlb_megatron.report.table import write_csv

NARROW = MODEL.replace("2048", "1024").replace("5632", "2816").replace("heads 16", "heads 8")
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
KINDS = {
    "dense": f"--num-layers 56 --pipeline-model-parallel-size 2 --global-batch-size 2 {RECOMPUTE} "
    "--wlb-micro-batches-per-window 1 --wlb-chunks off",
    "experts": f"--num-layers 16 --expert-model-parallel-size 2 --global-batch-size 2 {RECOMPUTE} --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 2816 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type aux_loss --moe-grouped-gemm",
}


def run_case(
    kind: str, gigabytes: float, steps: int, prefix: Path, out: Path, limit: float
) -> dict[str, Any]:
    figures, log = out / f"{kind}_{gigabytes:g}.jsonl", out / f"{kind}_{gigabytes:g}.log"
    figures.unlink(missing_ok=True)
    arguments = [
        *(NARROW.split() + TRAINING.split() + KINDS[kind].split()),
        *("--data-path", str(prefix), "--wlb-log", str(figures), "--train-iters", str(steps)),
        *("--seq-length", "32768", "--max-position-embeddings", "65536"),
    ]
    capped = environment(WLB_BENCH_GIB=str(gigabytes * 1e9 / (1 << 30)))
    status = torchrun(2, ["scripts.bench.training.capped_run", *arguments], capped, log, limit)
    rows = (
        [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
        if figures.exists()
        else []
    )
    shares = [row.get("recomputed_share", 1.0) for row in rows]
    over = [row["peak_gib"] / row["available_gib"] for row in rows if row.get("available_gib")]
    return {
        "case": f"{kind}, {gigabytes:g} GB",
        "status": status,
        "steps": len(rows),
        "recomputed_mean": sum(shares) / max(1, len(shares)),
        "recomputed_most": max(shares, default=0.0),
        "peak_over_available_mean": sum(over) / max(1, len(over)),
        "peak_over_available_most": max(over, default=0.0),
        "peak_over_planned_most": max(
            (row["peak_gib"] / row["planned_peak_gib"] for row in rows if row.get("planned_peak_gib")),
            default=0.0,
        ),
        "memory": "; ".join(
            line for line in log.read_text(errors="replace").splitlines() if "reserved at most" in line
        ),
    }


def main() -> None:
    parser = new_parser(__doc__, "cap")
    parser.add_argument("--cases", default="dense:80:300,dense:60:300,experts:80:300,experts:60:300")
    add_corpus(parser)
    parser.add_argument("--limit", type=float, default=240.0, help="time limit of a case (seconds)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prefix, rows = corpus(options), []
    for case in options.cases.split(","):
        kind, gigabytes, steps = case.split(":")
        rows.append(run_case(kind, float(gigabytes), int(steps), prefix, options.out, options.limit))
        write_csv(options.out / "memory_cap.csv", rows)
        print(
            " | ".join(
                f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}"
                for name, value in rows[-1].items()
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
