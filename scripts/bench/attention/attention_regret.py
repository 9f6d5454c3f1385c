"""What `choice` found, summed up: percent of unsharded / CP, regret, one backend against another. Numbers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]


def regrets(rows: Iterable[Row]) -> dict[tuple[int, str, int], float]:
    """By window, mix and degree: what adaptive took over the fastest of the ways that were run, minus 1."""
    best: dict[tuple[int, str, int], float] = {}
    taken: dict[tuple[int, str, int], float] = {}
    for row in rows:
        at, ms = _cell(row), float(row["ms"])
        best[at] = min(ms, best.get(at, math.inf))
        if int(row["chosen"]):
            taken[at] = ms
    return {at: ms / best[at] - 1 for at, ms in taken.items()}


def report(
    rows: Sequence[Row], errors: Sequence[Row], windows: Iterable[int], degrees: Sequence[int], name: str
) -> None:
    """Of each window and degree: what adaptive takes, of unsharded / CP, its regret, its parts; then the errors of
    predictions."""
    all_mixes = {row["mix"] for row in rows}
    samples = {mix for mix in all_mixes if mix.startswith("sample")} or all_mixes
    costs = regrets(rows)
    print(f"\n{name}: sums over {len(samples)} mixes, ms; adaptive's regret over all, its parts (predicted)")
    for window in windows:
        for cp in degrees:
            taken = [row for row in rows if int(row["chosen"]) and _cell(row)[::2] == (window, cp)]
            sampled = [row for row in taken if row["mix"] in samples] or taken
            if sampled:
                here = [cost for at, cost in costs.items() if at[::2] == (window, cp)]
                _print_sums(
                    window, cp, sampled, len(taken), sum(int(row["calls"]) == 1 for row in taken), here
                )
    if errors:
        measured = np.array([float(e["measured_ms"]) for e in errors])
        wrong = np.abs(np.array([float(e["predicted_ms"]) for e in errors]) / measured - 1)
        print(
            f"prediction of {len(wrong)} shares: error mean {wrong.mean():.1%}, p95 "
            f"{np.percentile(wrong, 95):.1%}, weighed by time {np.average(wrong, weights=measured):.1%}"
        )


def against(rows: Iterable[Row], name: str, others: Iterable[Row], other: str) -> None:
    """How many times as fast adaptive is by the first backend's kernels as by the other's, window by window."""
    first, second = ({_cell(r): float(r["ms"]) for r in of if int(r["chosen"])} for of in (rows, others))
    ratios = {at: second[at] / ms for at, ms in first.items() if at in second}
    cells = list(dict.fromkeys((window, cp) for window, _, cp in ratios))
    for window, cp in cells:
        here = {mix: ratio for (w, mix, c), ratio in ratios.items() if (w, c) == (window, cp)}
        least = min(here, key=lambda mix: here[mix])
        print(
            f"{window} CP={cp}: {len(here)} mixes, {name} {_mean(here.values()):.3f}x {other}, least "
            f"{here[least]:.3f} ({least})"
        )
    if ratios:
        print(f"all {len(ratios)} cells: {name} {_mean(ratios.values()):.3f}x {other}, geometric mean")


def _cell(row: Row) -> tuple[int, str, int]:
    return int(row["window"]), row["mix"], int(row["cp"])


def _mean(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def _print_sums(window: int, cp: int, rows: list[Row], count: int, ones: int, costs: list[float]) -> None:
    def total(column: str) -> float:
        return sum(float(row[column]) for row in rows)

    apart = total("ms") - total("exposed_ms")
    of_te, of_own = (total(f"unsharded{which}_ms") / cp / apart for which in ("", "_own"))
    print(
        f"{window:7} CP={cp}: adaptive {total('ms'):.2f}; {of_te:.1%} of unsharded / CP ({of_own:.1%} of its own "
        f"kernels' CP=1); one call in {ones} of {count}; regret mean {np.mean(costs):.2%}, most {max(costs):.2%}"
    )
    parts = ("ideal", "tile", "launch", "exchange", "imbalance")
    print("          " + "  ".join(f"{part} {total(f'{part}_ms'):.2f}" for part in parts), flush=True)
