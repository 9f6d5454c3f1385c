#!/usr/bin/env python3
"""Train a small GPT twice through Megatron's own loop on this machine's CPUs, plain and with WLB, and compare.

Four processes, PP=2 x CP=2, gloo. plain: arrival order, windows of --seq-length, per-sequence sharding with the
right document mask. wlb: variable-length packing, per-document sharding. The corpus is the Python standard library's
sources, byte by byte, one document a file; those longer than a window are left out. Then the same documents, as much
longer as a window of 128K is, are simulated on GPUs. Writes a table (also JSON) and a picture of both pipelines under
--out.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from scripts.environment import ROOT, cpu_environment
from scripts.megatron_job import build_python_corpus, run_job
from scripts.warm_ranks import WarmRanks
from wlb_megatron.errors import fatal

STAGES, PROCESSES = 2, 4
RUNS = {
    "plain": ["--wlb-packing", "original", "--wlb-sharding", "per-sequence"],
    # A micro-batch costs a CPU little by itself, so that more of them pay than on a GPU.
    "wlb": ["--wlb-packing", "varlen", "--wlb-sharding", "per-document", "--wlb-micro-batch-cost", "256"],
}
GPUS, WINDOW = 16, 128 * 1024
LAYOUT = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 2"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "main_job", help="folder of results")
    parser.add_argument("--iterations", type=int, default=5, help="training steps of each run")
    parser.add_argument("--seq-length", type=int, default=4096, help="window (tokens)")
    parser.add_argument("--global-batch-size", type=int, default=4, help="windows a step")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prefix = options.out / "corpus" / "python_sources"
    ranks = WarmRanks(PROCESSES, {**cpu_environment(), "PYTHONUNBUFFERED": "1"})  # the bar reads their log
    try:
        ranks.start()  # they import while the corpus is built, once for both runs
        build_python_corpus(prefix)
        results = {name: train(name, flags, prefix, options, ranks) for name, flags in RUNS.items()}
    finally:
        ranks.close()
    report(results, options)


def train(
    name: str, flags: list[str], prefix: Path, options: argparse.Namespace, ranks: WarmRanks
) -> list[dict[str, Any]]:
    """One run; returns its per-iteration figures with the loss. Its whole output goes to a log file."""
    figures, log = options.out / f"{name}.jsonl", options.out / f"{name}.log"
    figures.unlink(missing_ok=True)
    data = [
        *("--data-path", str(prefix), "--wlb-overlong", "drop", "--wlb-log", str(figures)),
        *("--seq-length", str(options.seq_length), "--max-position-embeddings", str(2 * options.seq_length)),
        *("--global-batch-size", str(options.global_batch_size)),
    ]
    job = [*LAYOUT.split(), *data, *flags]
    losses = run_job(name, job, log, ranks=ranks, iterations=options.iterations).training
    rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
    return [{**row, "loss": losses[row["iteration"]]} for row in rows]


def _drawn(name: str, row: dict[str, Any]) -> Any:
    from wlb_megatron.report.timeline import Drawn

    return Drawn(name, row["micro_batch_work"], row.get("chunk_groups"), row.get("chunks_of", ()))


def report(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Print and write the comparison: what balanced the step, what it is predicted to take, where the picture lies."""
    from rich.console import Console
    from rich.table import Table

    from wlb_megatron.report.timeline import draw_timelines
    from wlb_megatron.whole_files import write_whole

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
    on_gpus = simulate_on_gpus(options)
    summary = {
        name: {
            "loss": float(np.interp(common, trained[name], [row["loss"] for row in rows])),
            "micro_batches": mean(len(row["micro_batch_work"]) for row in rows),
            "micro_batch_imbalance": mean(row["imbalance"] for row in rows),
            "cp_imbalance": mean(row["cp_imbalance"] for row in rows),
            "trained_tokens": int(trained[name][-1]),
            "delayed_documents": sum(row["delayed"] for row in rows),
            "plan_ms": mean(row["plan_ms"] for row in rows),
            "step_over_work": mean(row["step_over_ideal"] for row in rows),
            "simulated_step": steps[index],
            "gpu_step_ms": on_gpus[name][0],
            "gpu_tokens_per_second": on_gpus[name][1],
        }
        for index, (name, rows) in enumerate(results.items())
    }
    lines = [
        ("micro-batches a step (8 windows of documents)", "micro_batches", "{:.1f}"),
        ("slowest micro-batch, work over the mean (1: even)", "micro_batch_imbalance", "{:.3f}"),
        ("slowest context-parallel rank, work over the mean", "cp_imbalance", "{:.3f}"),
        ("this example's step over its work (1: no stage ever waits)", "step_over_work", "{:.2f}"),
        (f"a 7B on {GPUS} H100s, window 128K: step (ms, simulated)", "gpu_step_ms", "{:,.0f}"),
        (f"a 7B on {GPUS} H100s, window 128K: tokens/s (simulated)", "gpu_tokens_per_second", "{:,.0f}"),
        (f"loss after {common:,} trained tokens", "loss", "{:.4f}"),
    ]
    table = Table(title=f"PP=2 x CP=2, {options.iterations} steps of {options.global_batch_size} windows")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    for label, key, form in lines:
        table.add_row(
            label.replace("8 windows", f"{options.global_batch_size} windows"),
            *(form.format(summary[name][key]) for name in results),
        )
    console = Console(width=max(100, shutil.get_terminal_size().columns), highlight=False)
    console.print(table)
    target = options.out / "summary.json"
    write_whole(target, json.dumps({"summary": summary, "iterations": results}, indent=1), "--out")
    print("\n".join(ending(summary, picture, shown, target, WINDOW // options.seq_length)))


def ending(
    summary: dict[str, dict[str, Any]], picture: Path, shown: int, target: Path, longer: int
) -> list[str]:
    """What a newcomer should take away."""
    plain, wlb = summary["plain"], summary["wlb"]
    gain = wlb["gpu_tokens_per_second"] / plain["gpu_tokens_per_second"]
    return [
        "plain fills windows as documents arrive: a long one makes its micro-batch slow, and every stage waits for it.",
        f"wlb makes {wlb['micro_batches']:.0f} micro-batches of like work, long documents in chunks, and cuts each "
        "evenly over the ranks.",
        f"On {GPUS} GPUs, with documents and window {longer} times as long: {gain:.2f} times the tokens/s, predicted.",
        f"Picture of step {shown + 1}: {picture}",
        f"All figures: {target}",
        "How long the runs took on this CPU means nothing: it computes masked attention in full, which a GPU skips.",
    ]


def simulate_on_gpus(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step and tokens/s of a 7B at TP=4 CP=2 PP=2 on H100s: the same documents, as many times longer
    as its window of 128K."""
    from wlb_megatron.config import WlbConfig
    from wlb_megatron.documents.lengths import read_lengths
    from wlb_megatron.packing.factory import arrival_order
    from wlb_megatron.simulator.job import Job
    from wlb_megatron.simulator.model import LayerModel
    from wlb_megatron.simulator.model_flags import SHAPES
    from wlb_megatron.workload.memory import Layout

    longer = WINDOW // options.seq_length
    lengths = np.asarray(read_lengths(str(options.out / "corpus" / "python_sources.idx")), dtype=np.int64)
    lengths = longer * lengths[lengths <= options.seq_length]
    job = Job(
        model=LayerModel(
            shape=SHAPES["7B"], layout=Layout(tensor=4, context=2, pipeline=2, distributed_optimizer=True)
        ),
        window=WINDOW,
        micro_batches=options.global_batch_size,
        iterations=options.iterations,
        warm_up=0,
        seed=1234,
    )
    timed = {
        name: job.run(lengths, config).simulated
        for name, config in (("plain", arrival_order(WlbConfig())), ("wlb", WlbConfig()))
    }
    return {
        name: (float(simulated.steps.mean()) / 1e6, 1e9 / simulated.ns_per_token)
        for name, simulated in timed.items()
    }


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # --out, most often
        raise SystemExit(fatal(str(error))) from None
