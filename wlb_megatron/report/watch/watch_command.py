"""`wlb-megatron watch`: reads the log once, or again and again, and shows it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from wlb_megatron.bounds import whole
from wlb_megatron.report.html import chart, page
from wlb_megatron.report.reproduction import Section
from wlb_megatron.report.table import print_table
from wlb_megatron.report.watch.run_log import RunLog
from wlb_megatron.report.watch.summary import share, summary
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
        write_whole(args.html, run_page(log, args.seconds if going_on else None), "--html")
        return
    if args.follow and sys.stdout.isatty():
        print("\x1b[2J\x1b[H", end="")
    print_table(str(log.path), ("", ""), summary(log))
    if (done := share(log)) is not None:
        print(f"[{'#' * int(50 * done):.<50}] {done:.1%}", flush=True)


def run_page(log: RunLog, reload: int | None = None) -> str:
    """HTML text. reload: seconds after which a browser reads the page again; None: never."""
    done = share(log)
    bar = "" if done is None else f'<progress value="{done:.4f}" max="1">{done:.1%}</progress>'
    charts = [
        chart(
            "step (ms)",
            [
                ("measured", log.column("measured_ms")),
                ("predicted", log.column("predicted_ms")),
                ("predicted in arrival order", log.column("arrival_ms")),
            ],
        ),
        chart("tokens/s/GPU", [("measured", log.column("tokens_per_second_per_gpu"))]),
        chart("TFLOP/s/GPU", [("of the model", log.column("tflops_per_gpu"))]),
        chart(
            "over even work",
            [
                ("step over ideal", log.column("step_over_ideal")),
                ("micro-batches", log.column("imbalance")),
                ("CP ranks", log.column("cp_imbalance")),
            ],
        ),
        chart("tokens an iteration", [("tokens", log.column("tokens"))]),
        chart("delay (iterations)", [("mean of tokens", log.column("token_delay"))]),
        chart("layers recomputed (share)", [("of all layers", log.column("recomputed_share"))]),
        chart("slowest rank", [("over the median", log.column("slowest_excess"))]),
    ]
    table = Section(
        "Now", ("", ""), [list(row) for row in summary(log)], "Medians of the last 100 iterations."
    )
    return page(
        f"The run of {log.path.name}",
        f"{len(log.rows):,} iterations in the log",
        [table],
        [],
        markup=[bar, *charts],
        reload=reload,
    )
