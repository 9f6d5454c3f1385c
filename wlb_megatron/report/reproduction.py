"""The reproduction's tables (for a terminal, Markdown, CSV and HTML) and pictures, from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

COLOURS = ("#9aa5b1", "#5b8db8", "#e0a030", "#2a7f5f")


class Section(NamedTuple):
    """A table with its title; cells are text. note: what to know when reading it."""

    title: str
    header: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""


def sections(report: dict[str, Any]) -> list[Section]:
    """All tables of a reproduction, in reading order."""
    told = [
        _speedups("Speed-up over plain 4D (simulated)", report["configurations"], report),
        _speedups("By window, 7B (simulated)", report["windows"], None),
        _plain("Breakdown at 7B-128K: speed-up over plain 4D", report["breakdown"]),
        _plain(
            "Micro-batch imbalance at 7B-128K, max/mean",
            report["packing"],
            "work: by the cost model; imbalance: of simulated micro-batch times, per-document sharding.",
        ),
        _plain(
            "A layer's attention at 7B-128K, CP=4, arrival order",
            report["sharding"],
            "The paper's adaptive choice: {:.3f}x per-sequence, {:.3f}x per-document.".format(
                *report["paper"]["sharding"].values()
            ),
        ),
        _plain(
            "Mean speed-up under other assumptions",
            report["sensitivity"],
            "At equal work: per unit of work, not per token: plain 4D cuts documents at windows' ends, and cut "
            "documents need less attention. In lockstep: if all stages advanced together at the largest "
            "micro-batch's pace, (m + P - 1) x largest, where 1F1B takes about sum + (P - 1) x largest.",
        ),
    ]
    told.insert(1, _explained(report))
    if report["large_job"]:
        rows = [{k: v for k, v in row.items() if not k.startswith("heat")} for row in report["large_job"]]
        told.append(_plain("405B on 8,192 GPUs (TP 8, CP 16, PP 16, DP 4)", rows))
    return told


def _explained(report: dict[str, Any]) -> Section:
    """From the simulated mean to the paper's, step by step."""
    cases = report["sensitivity"]
    uneven = next((case for case in cases if "as slow" in case["case"]), cases[0])
    rows = [
        ["simulated, by time per token", cases[0]["WLB-LLM"]],
        [
            "by time per work, as plain 4D's cut documents need less attention",
            cases[0]["WLB-LLM at equal work"],
        ],
        [f"and with {uneven['case']}", uneven["WLB-LLM at equal work"]],
        ["the paper", report["paper"]["mean"]["all"]],
        [
            "limit: simulated, all stages in lockstep with the largest micro-batch",
            cases[0]["WLB-LLM in lockstep"],
        ],
    ]
    title = "WLB-LLM's mean speed-up over plain 4D, and the paper's"
    return Section(title, ("how", "mean speed-up"), [[name, _cell(value)] for name, value in rows])


def _speedups(title: str, rows: list[dict[str, Any]], report: dict[str, Any] | None) -> Section:
    schemes = list(rows[0]["schemes"])
    header = ("setting", "TP x CP x PP x DP", *schemes, "bound", "ours of bound", "paper's WLB-LLM")
    table = []
    for row in rows:
        figures = [f"{row['schemes'][scheme]['speedup']:.3f}" for scheme in schemes]
        layout = " x ".join(map(str, row["layout"].values()))
        paper = _cell(row["paper_speedup"]) or "-"
        share = 100 * row["schemes"]["ours"]["of_bound"]
        table.append([row["name"], layout, *figures, f"{row['bound']:.3f}", f"{share:.1f} %", paper])
    if report is not None:
        for part, mean in report["means"]["ours"].items():
            chosen = [r for r in rows if part == "all" or r["name"].endswith(f"-{part}")]
            bound = float(np.mean([r["bound"] for r in chosen]))
            share = 100 * float(np.mean([r["schemes"]["ours"]["of_bound"] for r in chosen]))
            figures = [f"{report['means'][scheme][part]:.3f}" for scheme in schemes]
            paper = _cell(report["paper"]["mean"].get(part)) or "-"
            table.append([f"mean, {part}", "", *figures, f"{bound:.3f}", f"{share:.1f} %", paper])
            assert mean
    return Section(
        title, header, table, "Bound: the same documents, whole, spread perfectly evenly over all GPUs."
    )


def _plain(title: str, rows: Sequence[dict[str, Any]], note: str = "") -> Section:
    header = tuple(key.replace("_", " ") for key in rows[0])
    return Section(title, header, [[_cell(value) or "-" for value in row.values()] for row in rows], note)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:,.3f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def as_markdown(told: Sequence[Section]) -> str:
    lines: list[str] = []
    for title, header, rows, note in told:
        lines += [f"### {title}", "", *([note, ""] if note else [])]
        lines += ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    return "\n".join(lines)


def speedup_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each setting and scheme, for a CSV."""
    return [
        {"table": key, "setting": row["name"], "scheme": scheme, **figures, "bound": row["bound"]}
        | {"quadratic_at": row["quadratic_at"], "paper_speedup": row["paper_speedup"]}
        for key in ("configurations", "windows")
        for row in report[key]
        for scheme, figures in row["schemes"].items()
    ]


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
    for nth, (scheme, colour) in enumerate(zip(schemes, COLOURS, strict=True)):
        heights = [row["schemes"][scheme]["speedup"] for row in rows]
        at = np.arange(len(rows)) + 0.2 * (nth - 1.5)
        bars = axes.bar(at, heights, 0.19, label=scheme, color=colour)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    places = np.arange(len(rows))
    bounds = [row["bound"] for row in rows]
    axes.hlines(
        bounds, places - 0.4, places + 0.4, color="crimson", linestyle="--", label="perfectly balanced"
    )
    told = [(at, row["paper_speedup"]) for at, row in enumerate(rows) if row["paper_speedup"]]
    axes.plot([at + 0.1 for at, _ in told], [s for _, s in told], "k*", label="the paper's WLB-LLM")
    axes.set_xticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_ylim(0.8)
    axes.set_ylabel("speed-up over plain 4D (simulated)")
    figure.legend(fontsize=8, ncols=6, loc="outside upper center")
    return _save(figure, path)


def _draw_bars(rows: Sequence[dict[str, Any]], name: str, value: str, label: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.6 + 0.42 * len(rows)), layout="constrained")
    names = [row[name] for row in rows]
    bars = axes.barh(names, [row[value] for row in rows], color=COLOURS[3], height=0.6)
    axes.bar_label(bars, fmt="%.3f", fontsize=8, padding=3)
    for at, row in enumerate(rows):
        if row.get("paper"):
            axes.plot(
                row["paper"], at, "k*", label="" if axes.get_legend_handles_labels()[0] else "the paper"
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
    least, most = min(h.min() for h in heats), max(h.max() for h in heats)
    figure, axes = pyplot.subplots(
        1, len(jobs), figsize=(11, 5), sharey=True, layout="constrained", squeeze=False
    )
    for job, heat, place in zip(jobs, heats, axes[0], strict=True):
        image = place.imshow(heat, vmin=least, vmax=most, aspect="auto", cmap="magma_r")
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
