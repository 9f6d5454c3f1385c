#!/usr/bin/env python3
"""Train a small GPT twice through Megatron's own loop on this machine's CPUs, plain and with WLB, and compare.

Four processes, PP=2 x CP=2, gloo. plain: arrival order, windows of --seq-length, per-sequence sharding with the
right document mask. wlb: variable-length packing with delayed outliers, per-document sharding. The corpus is the
Python standard library's sources, byte by byte, one document a file; those longer than a window are left out.
Writes a table (also JSON) and a picture of both pipelines under --out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "cpu"))
from megatron_job import build_python_corpus, run_job  # noqa: E402

STAGES = 2
RUNS = {
    "plain": ["--wlb-packing", "original", "--wlb-sharding", "per-sequence"],
    "wlb": ["--wlb-packing", "varlen", "--wlb-sharding", "per-document"],
}
LAYOUT = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 2"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "main_job", help="folder of results")
    parser.add_argument("--iterations", type=int, default=16, help="training steps of each run")
    parser.add_argument("--seq-length", type=int, default=4096, help="window (tokens)")
    parser.add_argument("--global-batch-size", type=int, default=8, help="windows a step")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prefix = options.out / "corpus" / "python_sources"
    build_python_corpus(prefix)
    results = {name: train(name, flags, prefix, options) for name, flags in RUNS.items()}
    report(results, options)


def train(name: str, flags: list[str], prefix: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One run; returns its per-iteration figures with the loss. Its whole output goes to a log file."""
    figures, log = options.out / f"{name}.jsonl", options.out / f"{name}.log"
    figures.unlink(missing_ok=True)
    data = [
        *("--data-path", str(prefix), "--wlb-overlong", "drop", "--wlb-log", str(figures)),
        *("--seq-length", str(options.seq_length), "--max-position-embeddings", str(2 * options.seq_length)),
        *("--global-batch-size", str(options.global_batch_size)),
    ]
    losses = run_job(
        name, [*LAYOUT.split(), *data, *flags], log, processes=4, iterations=options.iterations
    ).training
    rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
    return [{**row, "loss": losses[row["iteration"]]} for row in rows]


def _drawn(name: str, row: dict[str, Any]) -> Any:
    from wlb_megatron.report.timeline import Drawn

    return Drawn(name, row["micro_batch_work"], row.get("chunk_groups"), row.get("chunks_of", ()))


def report(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Print and write the comparison: loss at the same number of trained tokens, balance, delay, plan time."""
    from rich.console import Console
    from rich.table import Table

    from wlb_megatron.report.timeline import draw_timelines

    trained = {name: np.cumsum([row["tokens"] for row in rows]) for name, rows in results.items()}
    common = int(min(tokens[-1] for tokens in trained.values()))
    picture = options.out / "timeline.png"
    by_imbalance = np.argsort([row["imbalance"] for row in results["plain"]], kind="stable")
    shown = int(by_imbalance[len(by_imbalance) // 2])
    steps = draw_timelines(
        picture,
        [_drawn(name, rows[shown]) for name, rows in results.items()],
        STAGES,
    )
    summary = {
        name: {
            "loss": float(np.interp(common, trained[name], [row["loss"] for row in rows])),
            "micro_batch_imbalance": mean(row["imbalance"] for row in rows),
            "cp_imbalance": mean(row["cp_imbalance"] for row in rows),
            "trained_tokens": int(trained[name][-1]),
            "delayed_documents": sum(row["delayed"] for row in rows),
            "token_delay": float(
                np.average([r["token_delay"] for r in rows], weights=[r["tokens"] for r in rows])
            ),
            "plan_ms": mean(row["plan_ms"] for row in rows),
            "simulated_step": steps[index],
        }
        for index, (name, rows) in enumerate(results.items())
    }
    lines = [
        (f"loss at {common:,} trained tokens", "loss", "{:.4f}"),
        ("imbalance over micro-batches (max/mean work)", "micro_batch_imbalance", "{:.3f}"),
        ("imbalance over CP ranks (max/mean work)", "cp_imbalance", "{:.3f}"),
        ("tokens trained", "trained_tokens", "{:,}"),
        ("documents delayed", "delayed_documents", "{}"),
        ("mean token delay (iterations)", "token_delay", "{:.3f}"),
        ("time of planning an iteration (ms)", "plan_ms", "{:.2f}"),
    ]
    table = Table(title=f"PP=2 x CP=2, {options.iterations} iterations, window {options.seq_length:,} tokens")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    for label, key, form in lines:
        table.add_row(label, *(form.format(summary[name][key]) for name in results))
    Console(width=max(100, shutil.get_terminal_size().columns)).print(table)
    target = options.out / "summary.json"
    partial = target.with_suffix(".json.partial")
    partial.write_text(json.dumps({"summary": summary, "iterations": results}, indent=1), encoding="utf-8")
    partial.replace(target)
    print(f"timelines of iteration {shown + 1}: {picture}\nall figures: {target}")


if __name__ == "__main__":
    main()
