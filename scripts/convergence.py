#!/usr/bin/env python3
"""Does reordering documents cost loss? One small GPT on the same tokens, plain, with WLB, and balanced over 8 batches.

Each run trains through Megatron's own loop in one process on the CPU and evaluates on held-out documents, packed in
arrival order whatever the arm. An arm's loss minus plain's of the same seed (same weights, same document stream) is
set against seed noise, the standard deviation of plain over seeds. The corpus is the Python standard library's
sources, byte by byte, one document a file; those longer than a window are left out.

    nice -n 10 python scripts/convergence.py [--seeds 3] [--iterations 120] [--out out/convergence]

Each run's figures are kept under --out and not made again: start it anew to go on, or with more --seeds to add some.
Writes a table (also convergence.txt), convergence.json and convergence.png.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "cpu"))
from megatron_job import build_python_corpus, run_job  # noqa: E402

ARMS = {
    "plain": "--wlb-packing original",
    "wlb": "--wlb-packing varlen",
    "greedy-8": "--wlb-packing fixed-greedy --wlb-balance-batches 8",
    "no-delay": "--wlb-packing varlen --wlb-max-delay 0",
}
"""greedy-8 is the paper's warning: windows balanced over 8 global batches, which reorders documents most. no-delay
tells what variable-length packing does without any reordering."""

SMALLER = """--num-layers 2 --num-attention-heads 2 --num-query-groups 1 --init-method-std 0.05
--lr 1e-2 --min-lr 1e-4 --lr-warmup-iters 8 --adam-beta2 0.95"""
HELD_OUT = "--split 80,20,0 --eval-iters 6"
"""The last fifth of the files; six batches are all of its documents, so that every seed is held to the same ones."""
Runs = dict[str, list[dict[str, Any]]]
"""Of each arm, one result a seed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "convergence", help="folder of results")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=list(ARMS)[1:],
        default=list(ARMS)[1:],
        help="what is compared with plain",
    )
    parser.add_argument("--iterations", type=int, default=120, help="training steps; a multiple of 8")
    parser.add_argument("--eval-interval", type=int, default=24, help="iterations between evaluations")
    parser.add_argument("--seq-length", type=int, default=1024, help="window (tokens)")
    parser.add_argument("--global-batch-size", type=int, default=4, help="windows a step")
    options = parser.parse_args()
    if options.seeds < 2 or options.iterations % 8 or not 0 < options.eval_interval <= options.iterations:
        parser.error("give at least 2 seeds, iterations in multiples of 8, and an interval within them")
    options.out.mkdir(parents=True, exist_ok=True)
    prefix = options.out / "corpus" / "python_sources"
    build_python_corpus(prefix)
    runs: Runs = {arm: [] for arm in ("plain", *options.arms)}
    for seed in range(1, options.seeds + 1):  # seed by seed, so that what is done can be compared at any time
        for arm in runs:
            runs[arm].append(train(arm, seed, prefix, options))
    report(runs, options)


def train(arm: str, seed: int, prefix: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run's losses and figures of its plans; read from its file if it was made with the same flags."""
    flags = [
        *(*SMALLER.split(), *HELD_OUT.split(), *ARMS[arm].split(), "--wlb-overlong", "drop"),
        *("--seed", str(seed), "--eval-interval", str(options.eval_interval)),
        *("--seq-length", str(options.seq_length), "--max-position-embeddings", str(2 * options.seq_length)),
        *("--global-batch-size", str(options.global_batch_size)),
    ]
    made_with = [*flags, "--train-iters", str(options.iterations)]
    kept = options.out / f"{arm}-{seed}.json"
    if kept.exists():
        result = json.loads(kept.read_text(encoding="utf-8"))
        if result["flags"] == made_with:
            return dict(result)
    name = f"{arm} {seed}"
    figures, log = kept.with_suffix(".jsonl"), kept.with_suffix(".log")
    figures.unlink(missing_ok=True)
    losses = run_job(
        name,
        [*flags, "--data-path", str(prefix), "--wlb-log", str(figures)],
        log,
        processes=1,
        iterations=options.iterations,
    )
    rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
    tokens = [row["tokens"] for row in rows]
    result = {
        "arm": arm,
        "seed": seed,
        "flags": made_with,
        "validation": losses.validation,
        "training": losses.training,
        "tokens": sum(tokens),
        "token_delay": float(np.average([row["token_delay"] for row in rows], weights=tokens)),
        "imbalance": float(np.mean([row["imbalance"] for row in rows])),
    }
    write(kept, json.dumps(result, indent=1))
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def report(runs: Runs, options: argparse.Namespace) -> None:
    """Print and write the comparison."""
    from rich.console import Console
    from rich.table import Table

    iterations = sorted(map(int, runs["plain"][0]["validation"]))
    losses = {
        arm: np.array([[run["validation"][str(at)] for at in iterations] for run in each])
        for arm, each in runs.items()
    }  # [seeds, evaluations]
    noise = losses["plain"].std(axis=0, ddof=1)
    summary = {arm: summarise(runs[arm], losses[arm], losses["plain"], noise) for arm in runs}
    table = Table(
        title=f"{options.seeds} seeds, {iterations[-1]} iterations of {options.global_batch_size} x "
        f"{options.seq_length:,} tokens; seed noise {noise[-1]:.4f}"
    )
    lines = [
        ("held-out loss, mean over seeds (nats/token)", "loss", "{:.4f}"),
        ("held-out loss minus plain's, mean", "difference", "{:+.4f}"),
        ("... its standard error", "standard_error", "{:.4f}"),
        ("... in seed noise", "in_noise", "{:+.2f}"),
        ("... relative to plain's loss (%)", "percent", "{:+.2f}"),
        ("training loss minus plain's, last quarter", "training_difference", "{:+.4f}"),
        ("mean token delay (iterations)", "token_delay", "{:.3f}"),
        ("imbalance over micro-batches (max/mean)", "imbalance", "{:.3f}"),
        ("tokens trained, mean", "tokens", "{:,.0f}"),
    ]
    last_quarter = [at for at in runs["plain"][0]["training"] if 4 * int(at) > 3 * options.iterations]
    for arm, each in runs.items():
        summary[arm]["training_difference"] = float(
            np.mean(
                [
                    run["training"][at] - plain["training"][at]
                    for run, plain in zip(each, runs["plain"], strict=True)
                    for at in last_quarter
                ]
            )
        )
    table.add_column("")
    for arm in runs:
        table.add_column(arm, justify="right")
    for label, key, form in lines:
        table.add_row(label, *(form.format(summary[arm][key]) for arm in runs))
    console = Console(width=100, record=True)
    console.print(table)
    write(options.out / "convergence.txt", console.export_text())
    write(
        options.out / "convergence.json",
        json.dumps(
            {"summary": summary, "noise": noise.tolist(), "evaluations": iterations, "runs": runs}, indent=1
        ),
    )
    draw(options.out / "convergence.png", iterations, losses, noise)
    print(f"picture: {options.out / 'convergence.png'}\nall figures: {options.out / 'convergence.json'}")


def summarise(
    each: list[dict[str, Any]], losses: np.ndarray, plain: np.ndarray, noise: np.ndarray
) -> dict[str, float]:
    """An arm's figures at the last evaluation. losses, plain: [seeds, evaluations]; noise: [evaluations]."""
    difference = losses[:, -1] - plain[:, -1]
    return {
        "loss": float(losses[:, -1].mean()),
        "difference": float(difference.mean()),
        "standard_error": float(difference.std(ddof=1) / len(difference) ** 0.5),
        "in_noise": float(difference.mean() / noise[-1]),
        "percent": float(100 * difference.mean() / plain[:, -1].mean()),
        "token_delay": float(np.mean([run["token_delay"] for run in each])),
        "imbalance": float(np.mean([run["imbalance"] for run in each])),
        "tokens": float(np.mean([run["tokens"] for run in each])),
    }


def draw(path: Path, iterations: list[int], losses: dict[str, np.ndarray], noise: np.ndarray) -> None:
    """Held-out loss of each run; each arm's difference from plain in the band of seed noise. Whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    right.fill_between(
        iterations, -noise, noise, color="0.85", label="plain: ±1 standard deviation over seeds"
    )
    for colour, (arm, curves) in zip(
        ("black", "tab:blue", "tab:red", "tab:green"), losses.items(), strict=False
    ):
        left.plot(iterations, curves.T, color=colour, alpha=0.3, linewidth=0.8)
        left.plot(iterations, curves.mean(axis=0), color=colour, label=arm, marker="o", markersize=3)
        if arm != "plain":
            difference = curves - losses["plain"]
            right.plot(iterations, difference.T, color=colour, alpha=0.3, linewidth=0.8)
            right.plot(
                iterations,
                difference.mean(axis=0),
                color=colour,
                label=f"{arm} - plain",
                marker="o",
                markersize=3,
            )
    right.axhline(0, color="black", linewidth=0.8)
    left.set_ylabel("held-out loss (nats per token)")
    right.set_ylabel("difference of the same seed (nats per token)")
    for axes in (left, right):
        axes.set_xlabel("iteration (thin: one seed, thick: mean)")
        axes.legend(fontsize=8)
    partial = path.with_name(f"{path.stem}.{os.getpid()}.partial{path.suffix}")
    figure.savefig(partial, dpi=120)
    pyplot.close(figure)
    partial.replace(path)


def write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main()
