"""What convergence.py's runs say: a table, a CSV of every evaluation, all figures as JSON, and a picture."""

from __future__ import annotations

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from wlb_megatron.whole_files import renamed_at_end

Runs = dict[str, list[dict[str, Any]]]
"""Of each arm, plain first, one result a seed."""

LINES = (
    ("held-out loss, whole documents (nats/token)", "loss", "{:.4f}"),
    ("... minus plain's, mean over seeds", "difference", "{:+.4f}"),
    ("... its standard error", "standard_error", "{:.4f}"),
    ("... in seed noise", "in_noise", "{:+.2f}"),
    ("... relative to plain's loss (%)", "percent", "{:+.2f}"),
    ("held-out loss, cut windows (nats/token)", "cut_loss", "{:.4f}"),
    ("... minus plain's, mean over seeds", "cut_difference", "{:+.4f}"),
    ("... its standard error", "cut_standard_error", "{:.4f}"),
    ("training loss minus plain's, last quarter", "training_difference", "{:+.4f}"),
    ("mean token delay (iterations)", "token_delay", "{:.3f}"),
    ("imbalance over micro-batches (max/mean)", "imbalance", "{:.3f}"),
    ("tokens trained, mean", "tokens", "{:,.0f}"),
    ("seconds a run, mean", "seconds", "{:.0f}"),
)


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
    summary = {arm: summarise(runs[arm], runs["plain"], losses, noise) for arm in runs}
    table = Table(
        title=f"{options.size} model, {options.device}: {len(runs['plain'])} seeds, {iterations[-1]} iterations of "
        f"{options.global_batch_size} x {options.seq_length:,} tokens; seed noise {noise[-1]:.4f}"
    )
    table.add_column("")
    for arm in runs:
        table.add_column(arm, justify="right")
    for label, key, form in LINES:
        table.add_row(label, *(form.format(summary[arm][key]) for arm in runs))
    console = Console(width=100, record=True)
    console.print(table)
    write(options.out / "convergence.txt", console.export_text())
    write(options.out / "convergence.csv", as_csv(runs, iterations))
    figures = {"summary": summary, "noise": noise.tolist(), "evaluations": iterations, "runs": runs}
    write(options.out / "convergence.json", json.dumps(figures, indent=1))
    draw(options.out / "convergence.png", iterations, losses, noise)
    print(f"picture: {options.out / 'convergence.png'}\nall figures: {options.out / 'convergence.json'}")


def summarise(
    each: list[dict[str, Any]], plain: list[dict[str, Any]], losses: dict[str, np.ndarray], noise: np.ndarray
) -> dict[str, float]:
    """An arm's figures at the last evaluation. losses: of each arm, [seeds, evaluations]; noise: [evaluations]."""
    final, reference = losses[each[0]["arm"]][:, -1], losses["plain"][:, -1]
    cut, cut_plain = (np.array([run["cut_windows"] for run in arm]) for arm in (each, plain))
    steps = list(plain[0]["training"])
    quarter = [at for at in steps if 4 * int(at) > 3 * int(steps[-1])]
    training = [
        run["training"][at] - other["training"][at]
        for run, other in zip(each, plain, strict=True)
        for at in quarter
    ]

    def error(difference: np.ndarray) -> float:
        return float(difference.std(ddof=1) / len(difference) ** 0.5)

    return {
        "loss": float(final.mean()),
        "difference": float((final - reference).mean()),
        "standard_error": error(final - reference),
        "in_noise": float((final - reference).mean() / noise[-1]),
        "percent": float(100 * (final - reference).mean() / reference.mean()),
        "cut_loss": float(cut.mean()),
        "cut_difference": float((cut - cut_plain).mean()),
        "cut_standard_error": error(cut - cut_plain),
        "training_difference": float(np.mean(training)),
        **{
            key: float(np.mean([run[key] for run in each]))
            for key in ("token_delay", "imbalance", "tokens", "seconds")
        },
    }


def as_csv(runs: Runs, iterations: list[int]) -> str:
    """One row an evaluation; cut windows are evaluated after the last iteration."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["arm", "seed", "iteration", "loss_whole_documents", "loss_cut_windows"])
    for arm, each in runs.items():
        for run in each:
            for at in iterations:
                cut = run["cut_windows"] if at == iterations[-1] else ""
                rows.writerow([arm, run["seed"], at, run["validation"][str(at)], cut])
    return text.getvalue()


def draw(path: Path, iterations: list[int], losses: dict[str, np.ndarray], noise: np.ndarray) -> None:
    """Held-out loss of each run; each arm's difference from plain in the band of seed noise. Whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    band = "plain: ±1 standard deviation over seeds"
    right.fill_between(iterations, -noise, noise, color="0.85", label=band)
    colours = ("black", "tab:blue", "tab:red", "tab:green")
    for colour, (arm, curves) in zip(colours, losses.items(), strict=False):
        left.plot(iterations, curves.T, color=colour, alpha=0.3, linewidth=0.8)
        left.plot(iterations, curves.mean(axis=0), color=colour, label=arm, marker="o", markersize=3)
        if arm != "plain":
            difference = curves - losses["plain"]
            mean = difference.mean(axis=0)
            right.plot(iterations, difference.T, color=colour, alpha=0.3, linewidth=0.8)
            right.plot(iterations, mean, color=colour, label=f"{arm} - plain", marker="o", markersize=3)
    right.axhline(0, color="black", linewidth=0.8)
    left.set_ylabel("held-out loss (nats per token)")
    right.set_ylabel("difference of the same seed (nats per token)")
    for axes in (left, right):
        axes.set_xlabel("iteration (thin: one seed, thick: mean)")
        axes.legend(fontsize=8)
    with renamed_at_end(path) as scratch:
        figure.savefig(scratch, dpi=120)
    pyplot.close(figure)


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    with renamed_at_end(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
