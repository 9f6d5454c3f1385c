"""Makes the reproduction's tables (for a terminal, Markdown and CSV) from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Section(NamedTuple):
    """A table with its title; cells are text. note: a hint to read it by."""

    title: str
    header: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""


def sections(report: dict[str, Any]) -> list[Section]:
    """All tables of a reproduction, in reading order."""
    balance_tables = {
        "configurations": ("One model chunk a stage, as many windows a step as stages", False),
        "interleaved": ("Two model chunks a stage", True),
        "many_windows": ("16 windows a step", True),
    }
    tables = [
        _speedups("Speed-up over plain 4D (simulated)", report["configurations"], report["paper"]["mean"]),
        *(_balance(title, report[key]) for key, (title, _) in balance_tables.items()),
        _speedups("By window, 7B (simulated)", report["windows"]),
        *(
            _speedups(f"{title} (simulated)", report[key], {})
            for key, (title, has_speedups) in balance_tables.items()
            if has_speedups
        ),
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
    tables.insert(1, _explained(report))
    if report["large_job"]:
        rows = [{k: v for k, v in row.items() if not k.startswith("heat")} for row in report["large_job"]]
        tables.append(_plain("405B on 8,192 GPUs (TP 8, CP 16, PP 16, DP 4)", rows))
    return tables


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


def _balance(title: str, rows: list[dict[str, Any]]) -> Section:
    """Each scheme's micro-batches and steps, means over the settings."""
    table = []
    for scheme in rows[0]["schemes"]:
        figures = [
            np.mean([row["schemes"][scheme][key] for row in rows])
            for key in ("micro_batches", "imbalance", "step_over_ideal", "speedup", "equal_work_speedup")
        ]
        maxima = [
            max(row["schemes"][scheme][key] for row in rows) for key in ("largest_windows", "held_windows")
        ]
        table.append(
            [
                *(scheme, f"{figures[0]:.1f}"),
                *(f"{figure:.3f}" for figure in figures[1:]),
                *(f"{figure:.2f}" for figure in maxima),
            ]
        )
    header = (
        *("", "micro-batches", "imbalance of time", "step over ideal", "speed-up", "at equal work"),
        *("largest micro-batch", "held at once"),
    )
    return Section(
        f"{title}: means over the settings (simulated)",
        header,
        table,
        "Imbalance of time: max/mean of micro-batch times. Step over ideal: a step over its GPUs' computing spread "
        "evenly, with neither bubble nor waiting. The largest micro-batch, and the tokens that the first stage holds "
        "at once at most, are in windows and of all settings.",
    )


def _speedups(title: str, rows: list[dict[str, Any]], paper_means: dict[str, float] | None = None) -> Section:
    """paper_means: by part of the settings, of which means are shown; None: no means."""
    schemes = list(rows[0]["schemes"])
    equal_work_schemes = ("WLB-LLM", "ours")
    header = (
        *("setting", "TP x CP x PP x DP", *schemes, "bound", "ours of bound"),
        *(*(f"{scheme}, equal work" for scheme in equal_work_schemes), "paper's WLB-LLM"),
    )

    def line(
        name: str, layout: str, rows_of_line: Sequence[dict[str, Any]], paper: float | None
    ) -> list[str]:
        def mean(scheme: str, figure: str) -> float:
            return float(np.mean([row["schemes"][scheme][figure] for row in rows_of_line]))

        return [
            *(name, layout, *(f"{mean(scheme, 'speedup'):.3f}" for scheme in schemes)),
            f"{np.mean([row['bound'] for row in rows_of_line]):.3f}",
            f"{100 * mean('ours', 'of_bound'):.1f} %",
            *(f"{mean(scheme, 'equal_work_speedup'):.3f}" for scheme in equal_work_schemes),
            _cell(paper) or "-",
        ]

    table = [
        line(row["name"], " x ".join(map(str, row["layout"].values())), [row], row["paper_speedup"])
        for row in rows
    ]
    if paper_means is not None:
        windows = sorted({row["name"].rpartition("-")[2] for row in rows}, key=lambda k: int(k[:-1]))
        for part in ("all", *windows):
            part_rows = [row for row in rows if part == "all" or row["name"].endswith(f"-{part}")]
            table.append(line(f"mean, {part}", "", part_rows, paper_means.get(part)))
    return Section(
        title,
        header,
        table,
        "By time per token. Bound: our documents, whole, spread perfectly evenly over all GPUs; plain and fixed "
        "windows cut documents, which then need less attention. At equal work: per unit of work instead.",
    )


def _plain(title: str, rows: Sequence[dict[str, Any]], note: str = "") -> Section:
    header = tuple(key.replace("_", " ") for key in rows[0])
    return Section(title, header, [[_cell(value) or "-" for value in row.values()] for row in rows], note)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def as_page(report: dict[str, Any]) -> str:
    """Markdown with the summary, all tables and what they assume."""
    share = [row["schemes"]["ours"]["of_bound"] for row in report["configurations"]]
    means = report["means"]
    source = report.get("profile") or f"a table of {report['kernel_table']}"
    summary = (
        f"Simulated, not measured: kernel times from {source}, network and other rates as below. "
        f"Mean speed-up over plain 4D: WLB-LLM as its paper describes it {means['WLB-LLM']['all']:.3f} "
        f"(the paper: {report['paper']['mean']['all']:.2f}), ours {means['ours']['all']:.3f}, "
        f"at least {100 * min(share):.1f} % of a perfectly balanced plan's with as many micro-batches; with 1 "
        f"micro-batch a window {means['ours, 1 micro-batch a window']['all']:.3f}."
    )
    assumption_rows = [[name, f"{value:,g}"] for name, value in report["assumptions"].items()]
    tables = [*sections(report), Section("Assumptions", ("figure", "value"), assumption_rows)]
    return f"# Balanced packing and context parallelism, simulated\n\n{summary}\n\n{as_markdown(tables)}"


def as_markdown(tables: Sequence[Section]) -> str:
    lines: list[str] = []
    for title, header, rows, note in tables:
        lines += [f"### {title}", "", *([note, ""] if note else [])]
        lines += ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    return "\n".join(lines)


def speedup_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each setting and scheme, for a CSV."""
    return [
        {"table": key, "setting": row["name"], "scheme": scheme, **figures, "bound": row["bound"]}
        | {"quadratic_at": row["quadratic_at"], "paper_speedup": row["paper_speedup"]}
        for key in ("configurations", "windows", "interleaved", "many_windows")
        for row in report[key]
        for scheme, figures in row["schemes"].items()
    ]


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
