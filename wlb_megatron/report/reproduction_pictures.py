"""Draws the reproduction's pictures from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

COLORS = ("#9aa5b1", "#5b8db8", "#e0a030", "#7fb99b", "#2a7f5f")


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """speedups.png, breakdown.png, sharding.png and, where the large job ran, heat.png."""
    import matplotlib

    matplotlib.use("Agg")
    paths = [
        _draw_speedups(report, folder / "speedups.png"),
        _draw_bars(
            report["breakdown"], "part", "simulated", "speed-up over plain 4D", folder / "breakdown.png"
        ),
        _draw_bars(
            report["sharding"], "sharding", "ms", "ms of a layer's attention", folder / "sharding.png"
        ),
    ]
    if report["large_job"]:
        paths.append(_draw_heat(report["large_job"], folder / "heat.png"))
    return paths


def _draw_speedups(report: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4), layout="constrained")
    rows = report["configurations"]
    schemes = list(rows[0]["schemes"])
    for nth, (scheme, color) in enumerate(zip(schemes, COLORS, strict=True)):
        heights = [row["schemes"][scheme]["speedup"] for row in rows]
        place = np.arange(len(rows)) + 0.17 * (nth - 2)
        bars = axes.bar(place, heights, 0.16, label=scheme, color=color)
        for text in axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2):
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8})
    places = np.arange(len(rows))
    bounds = [row["bound"] for row in rows]
    axes.hlines(
        bounds,
        places - 0.4,
        places + 0.4,
        color="crimson",
        linestyle="--",
        label="whole documents, perfectly even, as many micro-batches",
    )
    paper = [(place, row["paper_speedup"]) for place, row in enumerate(rows) if row["paper_speedup"]]
    axes.plot([place for place, _ in paper], [s for _, s in paper], "k*", label="the paper's WLB-LLM")
    axes.set_xticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_ylim(0.8)
    axes.set_ylabel("speed-up over plain 4D (simulated)")
    figure.legend(fontsize=8, ncols=4, loc="outside upper center")
    return _save(figure, path)


def _draw_bars(rows: Sequence[dict[str, Any]], name: str, value: str, label: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.6 + 0.42 * len(rows)), layout="constrained")
    names = [row[name] for row in rows]
    bars = axes.barh(names, [row[value] for row in rows], color=COLORS[-1], height=0.6)
    axes.bar_label(bars, fmt="%.3f", fontsize=8, padding=3)
    for place, row in enumerate(rows):
        if row.get("paper"):
            axes.plot(
                row["paper"], place, "k*", label="" if axes.get_legend_handles_labels()[0] else "the paper"
            )
    if any(row.get("paper") for row in rows):
        axes.legend(fontsize=8)
        axes.set_xlim(0.9)
    axes.invert_yaxis()
    axes.set_xlabel(f"{label} (simulated)")
    return _save(figure, path)


def _draw_heat(jobs: Sequence[dict[str, Any]], path: Path) -> Path:
    """One iteration: each GPU's computing time over its scheme's mean, context ranks across."""
    from matplotlib import pyplot

    heats = [np.array(job["heat_of_one"]) for job in jobs]
    heats = [heat / heat.mean() for heat in heats]
    lowest, highest = min(h.min() for h in heats), max(h.max() for h in heats)
    figure, axes = pyplot.subplots(
        1, len(jobs), figsize=(11, 5), sharey=True, layout="constrained", squeeze=False
    )
    for job, heat, place in zip(jobs, heats, axes[0], strict=True):
        image = place.imshow(heat, vmin=lowest, vmax=highest, aspect="auto", cmap="magma_r")
        place.set_title(f"{job['scheme']}: max/min {heat.max() / heat.min():.2f}", fontsize=10)
        place.set_xlabel("context-parallel rank (8 tensor ranks each)")
    axes[0, 0].set_ylabel("data-parallel rank x pipeline stage")
    figure.colorbar(
        image, ax=axes[0].tolist(), label="computing time of one iteration over the mean (simulated)"
    )
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
