"""The reproduction's mean speed-ups under other assumptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from scripts.reproduce import paper
from scripts.reproduce.compare import OURS, PAPER, PLAIN, Inputs, SettingRuns, compare_schemes, means
from wlb_megatron.workload.kernel_table import KernelTable

UNEVEN_ITERATIONS = 1000
"""Iterations. Outliers are rare: over 300 iterations the factor below still differs by 4 % between seeds, over 1,000
by 2 %."""


FLASH_ATTENTION_2 = 0.35 * 989e12
"""FLOP/s on an H100, as the paper of FlashAttention-3 (arXiv 2407.08608) says of its predecessor: 35 % of the peak."""


def vary(
    inputs: Inputs,
    base_rows: list[dict[str, Any]],
    tick: Callable[[], None],
    row: Callable[[str, Callable[[], Any]], Any],
) -> list[dict[str, Any]]:
    """Mean speed-ups over the eight configurations under other assumptions. base_rows: the rows under these. row: keeps
    what a function makes, by name."""
    more_inputs = replace(inputs, iterations=max(inputs.iterations, UNEVEN_ITERATIONS))
    factor = row("slowness of the paper", partial(slowness_of_the_paper, more_inputs))
    older = _rate(inputs.measured) / FLASH_ATTENTION_2
    cases = [
        ("30 % of TP communication exposed", _with_exposed(inputs, 0.3)),
        (
            f"attention {factor:.2f} times as slow, at which 7B-128K is as uneven as the paper's",
            replace(inputs, measured=_slower(inputs.measured, factor)),
        ),
        (
            f"attention at FlashAttention-2's 35 % of an H100's peak, {older:.2f} times as slow",
            replace(inputs, measured=_slower(inputs.measured, older)),
        ),
        ("lengths not stretched to the window", replace(inputs, stretch=False)),
    ]
    rows = [summarize("as assumed", base_rows)]
    for name, case in cases:
        table = []
        for setting in paper.CONFIGURATIONS:
            tick()
            table.append(row(f"{name}, {setting.name}", partial(compare_schemes, case, setting)))
        rows.append(summarize(name, table))
    return rows


def slowness_of_the_paper(inputs: Inputs) -> float:
    """Factor on attention's time, from 0.25 to 4, at which arrival order's imbalance at 7B-128K is the paper's 1.44.

    The paper gives neither kernels nor rates. Its imbalance tells how much attention weighs in its jobs.
    """
    run = SettingRuns(inputs, paper.BREAKDOWN_OF)
    pieces = [
        [np.array([x.end - x.start for x in m.pieces]) for row in plan.micro_batches for m in row]
        for plan in run.planned("original")
    ]
    low, high = 0.25, 4.0
    for _ in range(20):
        factor = (low * high) ** 0.5
        cost = replace(run.cost, quadratic_at=run.cost.quadratic_at / factor)
        works = np.array([[cost.work(m).sum() for m in plan] for plan in pieces])
        uneven = float((works.max(axis=1) / works.mean(axis=1)).mean())
        low, high = (low, factor) if uneven > paper.IMBALANCE["original"] else (factor, high)
    return factor


def summarize(case: str, table: list[dict[str, Any]]) -> dict[str, Any]:
    """One row: means over a table of compare_schemes."""
    row: dict[str, Any] = {"case": case, "bound": float(np.mean([r["bound"] for r in table]))}
    row |= {scheme: by_window["all"] for scheme, by_window in means(table).items() if scheme != PLAIN}
    for key, name in (("equal_work_speedup", "at equal work"), ("lockstep_speedup", "in lockstep")):
        row |= {f"{scheme} {name}": means(table, key)[scheme]["all"] for scheme in (PAPER, OURS)}
    return row


def _with_exposed(inputs: Inputs, share: float) -> Inputs:
    return replace(inputs, assumptions=replace(inputs.assumptions, tp_exposed=share))


def _rate(table: KernelTable) -> float:
    """FLOP/s of a document of 64K, forward + backward."""
    ns = float(table.diagonal_ns(np.array([65536], dtype=np.int64))[0])
    return 3.5 * 4 * table.heads * table.head_dim * 65536**2 / 2 / ns * 1e9


def _slower(table: KernelTable, factor: float) -> KernelTable:
    def grid(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(ns * factor for ns in row) for row in rows)

    return replace(
        table,
        rectangle=grid(table.rectangle),
        bottom_right=grid(table.bottom_right),
        diagonal=tuple(ns * factor for ns in table.diagonal),
        tile_key=table.tile_key * factor,
    )
