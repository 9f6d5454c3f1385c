"""`wlb-megatron watch`: a --wlb-log, read while a run appends to it, and what it comes to, as a table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from wlb_megatron.config import whole
from wlb_megatron.errors import WlbError
from wlb_megatron.report.terminal import duration, print_table

KEPT = (
    *("iteration", "tokens", "consumed_tokens", "train_iterations", "seconds_left"),
    *("measured_ms", "predicted_ms", "arrival_ms", "tflops_per_gpu", "tokens_per_second_per_gpu"),
    *("step_over_ideal", "imbalance", "cp_imbalance"),
    *("dp_imbalance", "plan_wait_ms", "token_delay", "waiting_documents", "most_epochs", "memory_peak_gb"),
    *("recomputed_share", "peak_gib", "planned_peak_gib", "available_gib"),
    *("slowest_rank", "slowest_host", "slowest_excess", "update_skipped"),
)
"""Figures that are shown, so that weeks of a run fit into memory."""

Row = dict[str, Any]

NO_PAGE = (
    "note: --html does nothing from this release on, and will be refused from the next: TensorBoard and Weights & "
    "Biases draw the same figures (wlb/...)"
)


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Flags of `wlb-megatron watch`."""
    parser.description = (
        "Shows a run from its --wlb-log: progress, time left, speed, gain over arrival order, balance, slow ranks, "
        "restarts. Figures of now are medians of the last 100 iterations."
    )
    parser.add_argument("log", metavar="STEPS.jsonl", type=Path, help="the file of --wlb-log")
    parser.add_argument("--html", help=argparse.SUPPRESS)
    parser.add_argument(
        "--follow", action="store_true", help="go on until Ctrl-C or the run's last iteration"
    )
    parser.add_argument(
        "--seconds", type=whole(1), default=10, help="between two looks with --follow (default: 10)"
    )
    parser.set_defaults(run=run_watch)


def run_watch(args: argparse.Namespace) -> None:
    """Show the run, with --follow again whenever the log has grown."""
    if args.html is not None:
        print(NO_PAGE, file=sys.stderr)
    log = RunLog(args.log)
    changed = log.read()
    while True:
        if changed or not args.follow:
            _show(log, clear=args.follow and sys.stdout.isatty())
        if not args.follow or share(log) == 1.0:
            return
        time.sleep(args.seconds)
        changed = log.read()


def _show(log: RunLog, *, clear: bool) -> None:
    if clear:
        print("\x1b[2J\x1b[H", end="")
    print_table(str(log.path), ("", ""), summary(log))
    if (trained_share := share(log)) is not None:
        print(f"[{'#' * int(50 * trained_share):.<50}] {trained_share:.1%}", flush=True)


class RunLog:
    """The lines of a --wlb-log. rows: the last line of each iteration. starts: the times at which the run's processes
    began.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[int, Row] = {}
        self.starts: set[float] = set()
        self._read = 0

    def read(self) -> bool:
        """Take up what was appended; whether there was anything. WlbError if the file cannot be read, or is no log.

        A line that is still being written is left for the next time. Lines of a file that was replaced replace all.
        """
        try:
            if self.path.stat().st_size < self._read:
                self.rows, self.starts, self._read = {}, set(), 0
            with self.path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError as error:
            raise WlbError(f"cannot read {self.path}: {error.strerror}; give the file of --wlb-log") from None
        complete_lines = text[: text.rfind(b"\n") + 1]
        self._read += len(complete_lines)
        for line in complete_lines.splitlines():
            if line.strip():
                self._add(line)
        return bool(complete_lines)

    def _add(self, line: bytes) -> None:
        try:
            figures = json.loads(line)
            iteration = int(figures["iteration"])
            if not _fits("tokens", figures["tokens"]):
                raise TypeError
            self.rows[iteration] = {
                name: value
                for name in KEPT
                if (value := figures.get(name)) is not None and _fits(name, value)
            }
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            if self.rows:  # a killed job left half a line, to which the next one appended
                return
            raise WlbError(f"{self.path} is no --wlb-log: {line[:60]!r} is not one of its lines") from None
        if isinstance(figures.get("started"), int | float):
            self.starts.add(figures["started"])


def _fits(name: str, value: Any) -> bool:
    """Whether a figure can be shown: all are numbers, but for the name of a host."""
    return isinstance(value, str) if name == "slowest_host" else isinstance(value, int | float)


LATEST = 100
"""Iterations that figures of now are the median of."""


def summary(log: RunLog) -> list[tuple[str, str]]:
    """Rows for a table; what the log does not have is left out."""
    rows = [row for _, row in sorted(log.rows.items())]
    if not rows:
        return [("iterations", "none yet")]
    last, latest = rows[-1], rows[-LATEST:]
    cells = [("iteration", _progress(last))]
    if seconds_left := last.get("seconds_left"):
        cells.append(("time left", duration(seconds_left)))
    cells.append(("tokens", _tokens(last)))
    if pace := _median(latest, "measured_ms"):
        rate = median(1e3 * row["tokens"] / row["measured_ms"] for row in _with(latest, "measured_ms"))
        text = f"{pace:,.0f} ms, {rate:,.0f} tokens/s"
        if gpu := _median(latest, "tokens_per_second_per_gpu"):
            text += f", {gpu:,.0f} a GPU"
        if operations := _median(latest, "tflops_per_gpu"):
            text += f" ({operations:,.0f} TFLOP/s)"
        cells.append(("step", text))
    if both := _with(latest, "measured_ms", "predicted_ms"):
        ratio = median(row["measured_ms"] / row["predicted_ms"] for row in both)
        cells.append(("measured over predicted", f"{ratio:.3f}"))
    if both := _with(rows, "arrival_ms", "predicted_ms"):
        gain = sum(row["arrival_ms"] for row in both) / sum(row["predicted_ms"] for row in both)
        cells.append(("gain over arrival order", f"{gain:.3f} so far, predicted"))
    if over_ideal := _median(latest, "step_over_ideal"):
        parts = [
            f"{name} {value:.3f}"
            for name, key in (("micro-batches", "imbalance"), ("DP", "dp_imbalance"), ("CP", "cp_imbalance"))
            if (value := _median(latest, key))
        ]
        cells.append(("step over ideal", f"{over_ideal:.3f} (max/mean work: {', '.join(parts)})"))
    if "slowest_rank" in last:
        who, excess = f"{last['slowest_rank']} on {last['slowest_host']}", last["slowest_excess"]
        cost = f"at most {excess * (pace or 0):,.0f} ms a step"
        cells.append(("slowest rank", f"{who}: {excess:.0%} over the median, {cost}"))
    if peaks := [row["memory_peak_gb"] for row in rows if "memory_peak_gb" in row]:
        cells.append(("memory, last rank", f"{max(peaks):.1f} GB at most"))
    if (recomputed := _median(latest, "recomputed_share")) is not None:
        cells.append(("layers recomputed", f"{recomputed:.1%}"))
    if planned_steps := _with(latest, "peak_gib", "planned_peak_gib", "available_gib"):
        step = max(planned_steps, key=lambda row: row["peak_gib"])
        planned_gib, available = step["planned_peak_gib"], step["available_gib"]
        cells.append(
            (
                "memory of a step",
                f"{step['peak_gib']:.1f} GiB at most, {planned_gib:.1f} planned of {available:.1f}",
            )
        )
    delay = _median(latest, "token_delay")
    if delay is not None:
        cells.append(
            ("mean token delay", f"{delay:.3f} iterations, {last.get('waiting_documents', 0):,} pieces wait")
        )
    sizes = [row["tokens"] for row in latest]
    cells.append(("tokens an iteration", f"{min(sizes):,} to {max(sizes):,}"))
    if wait := _median(latest, "plan_wait_ms"):
        cells.append(("wait for plans", f"{wait:.1f} ms a step"))
    cells.append(("restarts", str(max(0, len(log.starts) - 1))))
    if skipped := sum(row.get("update_skipped", 0) for row in rows):
        cells.append(("updates thrown away", str(skipped)))
    return cells


def share(log: RunLog) -> float | None:
    """Iterations trained of all; None if it is not known."""
    last = log.rows[max(log.rows)] if log.rows else {}
    return min(1.0, last["iteration"] / last["train_iterations"]) if last.get("train_iterations") else None


def _progress(last: Row) -> str:
    of = last.get("train_iterations")
    return f"{last['iteration']:,}" + (f" of {of:,} ({last['iteration'] / of:.1%})" if of else "")


def _tokens(last: Row) -> str:
    epochs = f", {last['most_epochs']:.2f} epochs" if "most_epochs" in last else ""
    return f"{last.get('consumed_tokens', 0):,}{epochs}"


def _with(rows: list[Row], *names: str) -> list[Row]:
    return [row for row in rows if all(row.get(name) for name in names)]


def _median(rows: list[Row], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return median(values) if values else None
