"""Whole training steps in several 4D layouts: what each way of packing and sharding gains, measured and predicted.

python -m scripts.bench.training.bench_4d 8 --script ../Megatron-LM/pretrain_gpt.py --out out/4d

A GPT of about 1.5B parameters (32 layers of 2048), full recompute, on text cut to long-tailed lengths. Layouts are
TP,CP,PP,DP. Schemes: stock (Megatron without the plugin and without a document mask, another task: its loss does not
compare), plain (arrival order, per-sequence, right mask), one, two, four (whole documents, so many micro-batches a
window), whole (whole documents, as many micro-batches as the plan wants), nodelay (that, none delayed), chunks (long
documents in chunks), ours (the defaults). Endings: none (no layer is recomputed), full (all, by the flags), vpp2 (two
virtual stages).

All have the same data, seed and global batch. A run's log, its figures of each iteration and the table are written as
it ends, so that a call cut short keeps what it has; run again with other --layouts, the table takes in what is there.
Against plain: the fastest of those that are there. At equal work: by tokens and what their attention weighs, a second
(plain windows cut documents, and balanced runs hold some back: a token is not the same work in each).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.start import MODELS, PLAIN, STOCK, add_corpus, add_training, corpus, new_parser, run
from scripts.csv_files import write_csv

SHOWN = (
    "ms_a_step",
    "tokens_per_s_gpu",
    "against_plain",
    "at_equal_work",
    "predicted_ms",
    "error",
    "over_ideal",
    "micro_batches",
    "imbalance",
    "cp_imbalance",
    "peak_mb",
    "peak_gib",
    "recomputed",
    "loss",
)
"""Columns of the printed table."""

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TWO_STAGES = ["--num-virtual-stages-per-pipeline-rank", "2"]

LAYOUTS = {
    8: ["1,2,4,1", "2,2,2,1", "1,4,2,1", "1,8,1,1", "2,1,4,1", "1,1,4,2"],
    4: ["1,2,2,1", "1,1,4,1", "1,4,1,1", "1,2,1,2", "2,1,2,1", "2,2,1,1"],
    2: ["1,2,1,1", "1,1,2,1"],
    1: ["1,1,1,1"],
}
"""TP,CP,PP,DP for each number of GPUs."""


def schemes() -> dict[str, list[str]]:
    """Name: flags."""
    whole = ["--wlb-chunks", "off"]
    return {
        "stock": STOCK,
        "plain": PLAIN,
        "one": [*whole, "--wlb-micro-batches-per-window", "1"],
        "two": [*whole, "--wlb-micro-batches-per-window", "2"],
        "four": [*whole, "--wlb-micro-batches-per-window", "4"],
        "whole": whole,
        "nodelay": [*whole, "--wlb-max-delay", "0"],
        "chunks": ["--wlb-chunks", "on"],
        "ours": [],
        # Recomputation: static flags, and what each step cannot keep on a GPU with so much memory.
        "plain-none": PLAIN,
        "plain-none-vpp2": [*PLAIN, *TWO_STAGES],
        "plain-full": [*PLAIN, "--wlb-recompute", "off"],
        **{
            f"plain-block{layers}": [*PLAIN, "--wlb-recompute", "off", *_block(layers)]
            for layers in range(1, 17)
        },
        "ours-full": ["--wlb-recompute", "off"],
        "ours-vpp2": TWO_STAGES,
        "ours-80": ["--wlb-gpu-memory", "74.5"],
        "ours-80-full": ["--wlb-gpu-memory", "74.5", "--wlb-recompute", "off"],
    }


def _block(layers: int) -> list[str]:
    return ["--recompute-method", "block", "--recompute-num-layers", str(layers)]


def flags_of(layout: str) -> list[str]:
    """Megatron's flags of TP,CP,PP,DP; DP is what is left of the processes."""
    tp, cp, pp, _ = layout.split(",")
    flags = ["--tensor-model-parallel-size", tp, "--context-parallel-size", cp]
    flags += ["--pipeline-model-parallel-size", pp]
    return flags + (["--sequence-parallel"] if tp != "1" else [])


def main() -> None:
    parser = new_parser(__doc__, "4d")
    parser.add_argument("gpus", type=int, help="GPUs of this host to use")
    parser.add_argument(
        "--script", type=Path, help="Megatron-LM's pretrain_gpt.py (default: wlb_megatron.pretrain_gpt)"
    )
    parser.add_argument(
        "--layouts", nargs="+", help="TP,CP,PP,DP, several (default: those for this many GPUs)"
    )
    parser.add_argument("--schemes", default="stock,plain,ours", help="comma list")
    add_corpus(parser)
    add_training(parser, iterations=38, warm_up=8)
    parser.add_argument("--seq-length", type=int, default=131072, help="window (tokens)")
    parser.add_argument(
        "--global-batch-size", type=int, help="windows a step (default: 4 a data-parallel rank)"
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--extra",
        default=RECOMPUTE,
        help="further flags for every run (default: full recompute)",
    )
    parser.add_argument("--model", choices=MODELS, default="2048", help="kind of layers (default: 2048 wide)")
    parser.add_argument(
        "--warm-ranks",
        action="store_true",
        help="train run after run in the same processes, stock Megatron and the plugin in their own: saves the start",
    )
    parser.add_argument("--profile", type=Path, help="made by wlb-megatron profile: predictions are of it")
    parser.add_argument(
        "--spans",
        action="store_true",
        help="write when each forward and backward ran on each rank (NAME.spans.RANK), and log plans (with "
        "--warm-ranks; through wlb_megatron.pretrain_gpt)",
    )
    options = parser.parse_args()
    if options.spans and not options.warm_ranks:
        parser.error("--spans needs --warm-ranks")
    if options.profile:
        options.extra += f" --wlb-profile {options.profile}"
    layouts = options.layouts or LAYOUTS.get(options.gpus)
    if not layouts:
        parser.error(f"no layouts are known for {options.gpus} GPUs: give --layouts")
    for layout in layouts:
        tp, cp, pp, dp = map(int, layout.split(","))
        if tp * cp * pp * dp != options.gpus:
            parser.error(f"layout {layout} (TP,CP,PP,DP) does not use {options.gpus} GPUs")
    known = schemes()
    if unknown := [name for name in options.schemes.split(",") if name not in known]:
        parser.error(f"unknown schemes {', '.join(unknown)}: choose of {', '.join(known)}")

    options.out.mkdir(parents=True, exist_ok=True)
    prefix = corpus(options)
    chosen_batch = options.global_batch_size
    for layout in layouts:
        options.global_batch_size = chosen_batch or 4 * int(layout.split(",")[3])
        for name in options.schemes.split(","):
            measure(layout, name, prefix, options)


def measure(layout: str, scheme: str, prefix: Path, options: argparse.Namespace) -> None:
    """Train a scheme in a layout, keep its figures, and print the table of all that are there."""
    label = f"{layout.replace(',', '-')}_{scheme}"
    flags = flags_of(layout) + schemes()[scheme]
    if "none" in scheme:
        options = argparse.Namespace(**{**vars(options), "extra": options.extra.replace(RECOMPUTE, "")})
    result = {
        "layout": layout,
        "scheme": scheme,
        "gpus": options.gpus,
        "batch": options.global_batch_size,
        "window": options.seq_length,
        "rows": run(label, options.gpus, flags, prefix, options),
    }
    (options.out / f"{label}.result.json").write_text(json.dumps(result), encoding="utf-8")
    table(options)


def table(options: argparse.Namespace) -> None:
    """Of all results in the folder: CSV and print."""
    import torch

    results = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(options.out.glob("*.result.json"))]
    lines = [line for result in results if (line := summary(result, options.warm_up))]
    if not lines:
        return
    speed, worked = (
        {(line["layout"], line["scheme"]): line[what] for line in lines}
        for what in ("tokens_per_s_gpu", "work_per_s_gpu")
    )
    for line in lines:
        for name, figures in (("against_plain", speed), ("at_equal_work", worked)):
            plain = [
                figures[key] for key in figures if key[0] == line["layout"] and key[1].startswith("plain")
            ]
            line[name] = figures[line["layout"], line["scheme"]] / max(plain) if plain else None
        line["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
        line["torch"] = torch.__version__
    write_csv(options.out / "bench_4d.csv", lines)
    steps = [
        {"layout": result["layout"], "scheme": result["scheme"]} | row
        for result in results
        for row in result["rows"]
    ]
    write_csv(options.out / "bench_4d_iterations.csv", steps)
    print(f"\n{'TP,CP,PP,DP':12} {'scheme':8}" + "".join(f"{name:>13}" for name in SHOWN), flush=True)
    for line in lines:
        cells = (
            f"{value:13,.3f}" if isinstance(value := line[name], float) else f"{value or '':>13}"
            for name in SHOWN
        )
        print(f"{line['layout']:12} {line['scheme']:8}" + "".join(cells), flush=True)


def summary(result: dict[str, Any], warm_up: int) -> dict[str, Any] | None:
    timed = result["rows"][warm_up:]
    if not timed:
        return None
    total_ms = sum(row["ms"] for row in timed)
    predicted = [row["predicted_ms"] for row in timed if row["predicted_ms"] is not None]
    return {
        **{name: result[name] for name in ("layout", "scheme", "gpus", "batch", "window")},
        "steps": len(timed),
        "ms_a_step": median(row["ms"] for row in timed),
        "tokens_per_s_gpu": sum(row["tokens"] for row in timed) / total_ms * 1e3 / result["gpus"],
        "work_per_s_gpu": sum(row["work"] for row in timed) / total_ms * 1e3 / result["gpus"],
        "predicted_ms": median(predicted) if predicted else None,
        "error": sum(predicted) / total_ms - 1 if len(predicted) == len(timed) else None,
        "over_ideal": sum(row["step_over_ideal"] for row in timed) / len(timed),
        "micro_batches": sum(row["micro_batches"] for row in timed) / len(timed),
        "imbalance": sum(row["imbalance"] for row in timed) / len(timed),
        "cp_imbalance": sum(row["cp_imbalance"] for row in timed) / len(timed),
        "peak_mb": timed[-1]["peak_mb"],
        "peak_gib": max((row["peak_gib"] or 0.0 for row in timed), default=0.0),
        "recomputed": sum(row["recomputed_share"] or 0.0 for row in timed) / len(timed),
        "loss": timed[-1]["loss"],
    }


if __name__ == "__main__":
    main()
