"""Balance, delay and time of every packer, in tables made by one command.

    python -m scripts.bench.packing.bench_packing [--lengths FILE.npy] [--others FILE.npy] [--out FOLDER] \\
        [--sections a,b]

Sections: paper (the table of WLB-LLM's section 7.3: window 128K, 4 micro-batches, work d + d*d/24576), delay (balance
against the bound on delay, a picture), others (other lengths and windows, three shuffles), pipeline (predicted step
against its lower bound), time, large (the time of up to a million documents: minutes). Without --lengths and --others,
lengths come from seeded generators of the project. --out gets packing_<section>.csv and delay.png.

imbalance: largest over mean work of an iteration's micro-batches. slowdown: summed largest over summed mean, what all
steps together lose. delay: iterations a token waits, what waits at the end included. ms: of packing, per iteration.
gap: how far above the solver's own optimum its plans may be.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from scripts.bench.packing.packing_sections import (
    delay_cases,
    large_rows,
    other_cases,
    paper_cases,
    pipeline_rows,
    time_rows,
)
from scripts.bench.start import new_parser
from wlb_megatron.documents.synthetic import KINDS
from wlb_megatron.report.progress import progress
from wlb_megatron.report.table import print_table, write_csv

SECTIONS = ("paper", "delay", "others", "pipeline", "time", "large")


def mean_over_shuffles(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["lengths"], row["window"], row["packing"]), []).append(row)
    means = []
    for group in groups.values():
        row = {k: v for k, v in group[0].items() if k != "shuffle"}
        for key in ("imbalance", "p95", "max", "slowdown", "delay", "latest", "ms"):
            row[key] = f"{np.mean([float(r[key]) for r in group]):.3f}"
        means.append(row)
    return means


def draw_delay(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for name in dict.fromkeys(row["packing"] for row in rows):
        mine = [row for row in rows if row["packing"] == name]
        bounds = [row["bound"] for row in mine]
        (line,) = axes.plot(
            bounds, [float(row["imbalance"]) for row in mine], marker="o", label=f"{name}, mean"
        )
        axes.plot(
            bounds, [float(row["p95"]) for row in mine], ls=":", color=line.get_color(), label=f"{name}, p95"
        )
    axes.set(xlabel="bound on delay (iterations)", ylabel="largest / mean work", xscale="log")
    axes.set_title("Balance against the bound on delay (window 128K, 4 micro-batches)")
    axes.set_xticks(bounds, [str(bound) for bound in bounds])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = new_parser(__doc__, "packing")
    parser.add_argument(
        "--lengths", type=Path, help="document lengths, .npy (default: paper-like, from a seed)"
    )
    parser.add_argument("--others", type=Path, help="other lengths for section others (default: web-like)")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    args = parser.parse_args()
    sections = args.sections.split(",")
    if unknown := sorted({*sections} - {*SECTIONS}):
        parser.error(f"unknown sections: {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    lengths = np.load(args.lengths) if args.lengths else KINDS["paper-like"](100_000, 0)
    others = np.load(args.others) if args.others else KINDS["web-like"](200_000, 0)
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    )

    cases = list(paper_cases(lengths)) if "paper" in sections else []
    cases += delay_cases(lengths) if "delay" in sections else []
    cases += (
        other_cases(others, args.others.stem if args.others else "web-like") if "others" in sections else []
    )
    rows: list[dict[str, Any]] = []
    with progress(sum(case.iterations for case in cases)) as tick:
        for case in cases:
            rows.append(case.run(lambda: tick("packing")))
    others_of = {
        "pipeline": (18, pipeline_rows(lengths)),
        "time": (16, time_rows()),
        "large": (8, large_rows()),
    }
    chosen = [others_of[section] for section in sections if section in others_of]
    with progress(sum(count for count, _ in chosen)) as tick:
        for _, each in chosen:
            for row in each:
                rows.append(row)
                tick("packing")

    for section in sections:
        shown = [row for row in rows if row["section"] == section]
        shown = mean_over_shuffles(shown) if section == "others" else shown
        if shown:
            header = [key for key in shown[0] if key != "section"]
            print_table(section, header, [[row[key] for key in header] for row in shown])
    args.out.mkdir(parents=True, exist_ok=True)
    for section in sections:
        write_csv(args.out / f"packing_{section}.csv", [row for row in rows if row["section"] == section])
    if "delay" in sections:
        draw_delay([row for row in rows if row["section"] == "delay"], args.out / "delay.png")


if __name__ == "__main__":
    main()
