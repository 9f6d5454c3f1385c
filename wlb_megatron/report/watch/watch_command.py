"""`wlb-megatron watch`: reads the log once, or again and again, and shows it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from wlb_megatron.bounds import whole
from wlb_megatron.report.table import print_table
from wlb_megatron.report.watch.page import page
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
        write_whole(args.html, page(log, args.seconds if going_on else None), "--html")
        return
    if args.follow and sys.stdout.isatty():
        print("\x1b[2J\x1b[H", end="")
    print_table(str(log.path), ("", ""), summary(log))
    if (trained_share := share(log)) is not None:
        print(f"[{'#' * int(50 * trained_share):.<50}] {trained_share:.1%}", flush=True)
