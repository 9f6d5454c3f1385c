"""Reads a --wlb-log while a run appends to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wlb_megatron.errors import WlbError

KEPT = (
    *("iteration", "tokens", "consumed_tokens", "train_iterations", "seconds_left", "time", "started"),
    *(
        "measured_ms",
        "predicted_ms",
        "arrival_ms",
        "tflops_per_gpu",
        "tokens_per_second_per_gpu",
        "step_over_ideal",
        "imbalance",
        "cp_imbalance",
    ),
    *("dp_imbalance", "plan_wait_ms", "token_delay", "waiting_documents", "most_epochs", "memory_peak_gb"),
    *("recomputed_share", "peak_gib", "planned_peak_gib", "available_gib"),
    *("slowest_rank", "slowest_host", "slowest_excess", "micro_batches", "update_skipped"),
)
"""Figures that are shown, so that weeks of a run fit into memory."""

Row = dict[str, Any]


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
            raise WlbError(f"{self.path} is no --wlb-log: {line[:60]!r} is not one of its lines") from None
        if isinstance(figures.get("started"), int | float):
            self.starts.add(figures["started"])

    def column(self, name: str) -> list[tuple[int, float]]:
        """Iterations that have the figure, in order, and the figure."""
        return [(iteration, row[name]) for iteration, row in sorted(self.rows.items()) if name in row]


def _fits(name: str, value: Any) -> bool:
    """Whether a figure can be shown: all are numbers, but for the name of a host."""
    return isinstance(value, str) if name == "slowest_host" else isinstance(value, int | float)
