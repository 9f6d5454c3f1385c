"""`wlb-megatron watch`: reads the log once, or again and again, and shows it: a table, or a page that works offline."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median

from wlb_megatron.bounds import whole
from wlb_megatron.report.run_log import RunLog, share, summary
from wlb_megatron.report.table import print_table
from wlb_megatron.whole_files import write_whole


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Flags of `wlb-megatron watch`."""
    parser.description = (
        "Shows a run from its --wlb-log: progress, time left, speed, gain over arrival order, balance, slow ranks, "
        "restarts. Figures of now are medians of the last 100 iterations."
    )
    parser.add_argument("log", metavar="STEPS.jsonl", type=Path, help="the file of --wlb-log")
    parser.add_argument(
        "--html", metavar="PAGE", type=Path, help="write a page that needs no network instead of a table"
    )
    parser.add_argument(
        "--follow", action="store_true", help="go on until Ctrl-C or the run's last iteration"
    )
    parser.add_argument(
        "--seconds",
        type=whole(1),
        default=10,
        help="between two looks with --follow, and of the page (default: 10)",
    )
    parser.set_defaults(run=run_watch)


def run_watch(args: argparse.Namespace) -> None:
    """Show the run, with --follow again whenever the log has grown."""
    log = RunLog(args.log)
    changed = log.read()
    while True:
        if changed or not args.follow:
            _show(log, args)
        if not args.follow or share(log) == 1.0:
            return
        time.sleep(args.seconds)
        changed = log.read()


def _show(log: RunLog, args: argparse.Namespace) -> None:
    if args.html is not None:
        going_on = args.follow and share(log) != 1.0
        write_whole(args.html, page(log, args.seconds if going_on else None), "--html")
        return
    if args.follow and sys.stdout.isatty():
        print("\x1b[2J\x1b[H", end="")
    print_table(str(log.path), ("", ""), summary(log))
    if (trained_share := share(log)) is not None:
        print(f"[{'#' * int(50 * trained_share):.<50}] {trained_share:.1%}", flush=True)


_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: .5em 0 1.5em; display: block; overflow-x: auto; }
td { padding: .25em .8em; border-bottom: 1px solid #8885; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 0 0 1em; }
figcaption { font-size: 13px; }
figure.chart { display: inline-block; width: 49%; min-width: 340px; }
figure.chart svg { width: 100%; }
progress { width: 100%; }
.note, footer { color: #777; max-width: 75ch; }
"""


def page(log: RunLog, reload: int | None = None) -> str:
    """HTML text with a run's progress, its figures of now and its charts.

    reload: seconds after which a browser reads the page again; None for never.
    """
    title, trained_share = escape(f"The run of {log.path.name}"), share(log)
    rows = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in summary(log))
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="refresh" content="{reload}">' if reload else "",
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1><p>{len(log.rows):,} iterations in the log</p>",
        '<h2>Now</h2><p class="note">Medians of the last 100 iterations.</p>',
        f"<table><tbody>\n{rows}\n</tbody></table>",
        ""
        if trained_share is None
        else f'<progress value="{trained_share:.4f}" max="1">{trained_share:.1%}</progress>',
        *(
            chart(title, [(name, log.column(figure)) for name, figure in lines.items()])
            for title, lines in CHARTS.items()
        ),
    ]
    return "\n".join([*parts, "</body></html>", ""])


CHARTS = {
    "step (ms)": {
        "measured": "measured_ms",
        "predicted": "predicted_ms",
        "predicted in arrival order": "arrival_ms",
    },
    "tokens/s/GPU": {"measured": "tokens_per_second_per_gpu"},
    "TFLOP/s/GPU": {"of the model": "tflops_per_gpu"},
    "over even work": {
        "step over ideal": "step_over_ideal",
        "micro-batches": "imbalance",
        "CP ranks": "cp_imbalance",
    },
    "tokens an iteration": {"tokens": "tokens"},
    "delay (iterations)": {"mean of tokens": "token_delay"},
    "layers recomputed (share)": {"of all layers": "recomputed_share"},
    "slowest rank": {"over the median": "slowest_excess"},
}
"""Of a page: figures of the log by title and name."""


def _cell(text: str) -> str:
    number = text.replace("%", "").replace(",", "").replace(".", "").strip().lstrip("-").isdigit()
    return f'<td class="number">{escape(text)}</td>' if number or text == "-" else f"<td>{escape(text)}</td>"


POINTS = 400
"""Of a line, at most: neighbours are joined to their median."""
WIDTH, HEIGHT, LEFT, BOTTOM = 520, 170, 64, 22
COLORS = ("#2a6fbb", "#d1682b", "#4a9a4a")

Line = Sequence[tuple[int, float]]


def chart(title: str, lines: Sequence[tuple[str, Line]]) -> str:
    """A figure of named lines; empty if none has two points."""
    drawn_lines = [(name, thinned(line)) for name, line in lines if len(line) > 1]
    if not drawn_lines:
        return ""
    points = [point for _, line in drawn_lines for point in line]
    first, last = min(iteration for iteration, _ in points), max(iteration for iteration, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def place(iteration: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - 8) * (iteration - first) / max(1, last - first)
        return f"{x:.1f},{(HEIGHT - BOTTOM) * (high - value) / (high - low):.1f}"

    paths = "".join(
        f'<polyline fill="none" stroke="{color}" points="{" ".join(place(*point) for point in line)}"></polyline>'
        for (_, line), color in zip(drawn_lines, COLORS, strict=False)
    )
    texts = [(LEFT - 6, 10, "end", f"{high:,.4g}"), (LEFT - 6, HEIGHT - BOTTOM, "end", f"{low:,.4g}")]
    texts += [
        (LEFT, HEIGHT - 6, "start", f"{first:,}"),
        (WIDTH - 8, HEIGHT - 6, "end", f"iteration {last:,}"),
    ]
    words = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(word)}</text>' for x, y, anchor, word in texts
    )
    names = " ".join(
        f'<span style="color:{color}">{escape(name)}</span>'
        for (name, _), color in zip(drawn_lines, COLORS, strict=False)
    )
    return (
        f'<figure class="chart"><figcaption>{escape(title)}: {names}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-size="10" fill="currentColor" role="img" aria-label="{escape(title)}">{paths}{words}</svg></figure>'
    )


def thinned(line: Line) -> list[tuple[int, float]]:
    """At most POINTS points: each the median of its neighbours, at the last one's iteration."""
    size = -(-len(line) // POINTS)
    parts = [line[start : start + size] for start in range(0, len(line), size)]
    return [(part[-1][0], median(value for _, value in part)) for part in parts]
