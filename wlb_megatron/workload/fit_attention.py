"""Fits attention's costs to a profile's samples, separately for forward and backward.

* Calls of one shape that fill the device give a segment's time per query-key pair.
* Calls of all shapes give the extra cost of a call, a segment and a row of queries or keys.
* Whole shares of micro-batches give what the executor adds around a call on earlier keys.

The last two are non-negative least squares of relative errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from wlb_megatron.workload.costs import TransferCost
from wlb_megatron.workload.kernel_table import HALF, TILE, KernelTable
from wlb_megatron.workload.pairs_table import (
    WAYS,
    Device,
    FloatArray,
    Sample,
    Way,
    filled,
    missing,
    pairs_table,
    samples_of,
)
from wlb_megatron.workload.profile import ProfiledModel

FITTED = ("documents", "share")
UNMEASURED_LATENCY, UNMEASURED_RATE = 50_000.0, 370e9
"""Nanoseconds of an exchange each way, and bytes a second of NVLink, where one GPU alone was profiled."""


class Overheads(NamedTuple):
    """What attention costs beside its pairs, in nanoseconds: a call, a segment, a row of its queries and keys in the
    kernels; around them, in the executor, a share's call on earlier keys and each row of its queries and keys."""

    call: float
    segment: float
    query: float
    key: float
    second_call: float
    moved_query: float
    moved_key: float


def predicted(sample: Sample, table: KernelTable, overheads: Overheads) -> float:
    """Nanoseconds of an attention sample, one way. table: times of the pairs alone."""
    return _pairs_ns(sample, table) + float(np.dot(_counts(sample), overheads))


def fit_attention(
    model: ProfiledModel, samples: Sequence[Sample], device: Device, way: Way, exchange: TransferCost | None
) -> KernelTable:
    """What a share of a micro-batch costs."""
    table, overheads = fit_way(model, samples, device, way)
    row = 2 * 2 * model.rank_kv_heads * model.head_dim  # K and V, or their gradients, in 2 bytes
    per_byte = exchange.per_byte if exchange else 1e9 / UNMEASURED_RATE
    return replace(
        table,
        call=overheads.call,
        segment=overheads.segment,
        query_row=overheads.query,
        key_row=overheads.key,
        second_call=overheads.second_call,
        moved_query=overheads.moved_query,
        moved_key=overheads.moved_key,
        exchange=exchange.latency if exchange else UNMEASURED_LATENCY,
        exchange_row=row * per_byte,
    )


def fit_way(
    model: ProfiledModel, samples: Sequence[Sample], device: Device, way: Way
) -> tuple[KernelTable, Overheads]:
    """First, what a call, a segment and rows cost inside the kernels, by calls of all shapes at one rate of pairs; then
    the pairs' own times at each shape, without that; last, what the executor adds to whole shares."""
    grid = [s for s in samples if s["part"] in ("rectangle", "diagonal", "bottom_right")]
    inside = _inside(model, samples, device, way)
    # Part of a call's time belongs to its pairs, whatever the overheads say.
    bare = [max(s[way][0] - float(_counts(s) @ inside), PAIRS_SHARE * s[way][0]) for s in grid]
    table = pairs_table(model, grid, device, way, bare)
    shares = [s for s in samples if s["part"] == "share"]
    if shares:
        measured = np.array([s[way][0] for s in shares], dtype=np.float64)
        residual = 1 - np.array([predicted(s, table, Overheads(*inside)) for s in shares]) / measured
        columns = np.array([_counts(s)[_AROUND] for s in shares]) / measured[:, None]
        inside[_AROUND] += least_squares(columns, residual)
    return table, Overheads(*inside.tolist())


PAIRS_SHARE = 0.1
_AROUND = [4, 5, 6]
"""Of Overheads, what the executor adds."""


def _inside(model: ProfiledModel, samples: Sequence[Sample], device: Device, way: Way) -> FloatArray:
    """float[7]: Overheads inside the kernels, from calls that fill the device."""
    kernels = [
        s
        for s in samples
        if s["part"] in ("call", "diagonal", "documents")
        or (s["part"] == "rectangle" and filled(model, s, device, way) == 1)
    ]
    if not samples_of(kernels, "call"):
        missing("an attention call")
    measured = np.array([s[way][0] for s in kernels], dtype=np.float64)
    columns = np.array([(*_counts(s)[:4], *_pairs(s)) for s in kernels]) / measured[:, None]
    return np.append(least_squares(columns, np.ones(len(kernels)))[:4], (0.0, 0.0, 0.0))


def _pairs(sample: Sample) -> tuple[float, float]:
    """Query-key pairs of diagonals and of rectangles, whole tiles of queries."""
    diagonals = ((-(-q // HALF) * HALF, n) for q, n in sample["sizes"]["diagonals"])
    rectangles = ((-(-q // TILE) * TILE, k, n) for q, k, n in sample["sizes"]["rectangles"])
    return sum(n * q * (q + TILE) / 2 for q, n in diagonals), sum(n * q * k for q, k, n in rectangles)


def _pairs_ns(sample: Sample, table: KernelTable) -> float:
    diagonals = np.array(sample["sizes"]["diagonals"], dtype=np.int64).reshape(-1, 2)
    rectangles = np.array(sample["sizes"]["rectangles"], dtype=np.int64).reshape(-1, 3)
    masked = np.array(sample["sizes"].get("bottom_right", []), dtype=np.int64).reshape(-1, 3)
    total = float((table.diagonal_ns(diagonals[:, 0]) * diagonals[:, 1]).sum())
    total += float((table.rectangle_ns(rectangles[:, 0], rectangles[:, 1]) * rectangles[:, 2]).sum())
    return total + float((table.bottom_right_ns(masked[:, 0], masked[:, 1]) * masked[:, 2]).sum())


def _counts(sample: Sample) -> FloatArray:
    """float[7]: what of Overheads a sample has. A share goes through the executor, which moves a second call's rows."""
    diagonals, rectangles = sample["sizes"]["diagonals"], sample["sizes"]["rectangles"]
    rectangles = rectangles + sample["sizes"].get("bottom_right", [])
    own = sum(q * n for q, n in diagonals)
    second = np.array(
        [bool(rectangles), sum(q * n for q, _, n in rectangles), sum(k * n for _, k, n in rectangles)]
    )
    segments = sum(n for *_, n in diagonals) + sum(n for *_, n in rectangles)
    inside = (bool(diagonals) + second[0], segments, own + second[1], own + second[2])
    return np.array([*inside, *(second * (sample["part"] == "share"))], dtype=np.float64)


def least_squares(columns: FloatArray, values: FloatArray) -> FloatArray:
    """Solution with no negative entry: the best among those in which some entries are nothing."""
    best, least = np.zeros(columns.shape[1]), float(values @ values)
    for count in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), count):
            part = columns[:, chosen]
            scale = np.linalg.norm(part, axis=0)
            if not scale.all():
                continue
            solved = np.linalg.lstsq(part / scale, values, rcond=None)[0] / scale
            residual = values - part @ solved
            if (solved >= 0).all() and residual @ residual < least:
                best = np.zeros(columns.shape[1])
                best[list(chosen)] = solved
                least = float(residual @ residual)
    return best


@dataclass(frozen=True)
class Check:
    """Relative errors of predicted attention times (forward + backward) of samples that the fit has not seen."""

    part: str
    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(np.abs(self.errors)))

    @property
    def p95(self) -> float:
        return float(np.percentile(np.abs(self.errors), 95))


def leave_out(model: ProfiledModel, samples: Sequence[Sample], device: Device, folds: int = 8) -> list[Check]:
    """Shares and documents, each predicted by a fit to those of other folds; and shapes that no fit is made to."""
    errors: dict[str, list[float]] = {}
    fitted = [sample for sample in samples if sample["part"] in FITTED]
    for fold in range(folds):
        left_out = {id(s) for s in fitted[fold::folds]}
        seen = [s for s in samples if id(s) not in left_out]
        tested = [s for s in samples if id(s) in left_out or (fold == 0 and s["part"] == "held_out")]
        if not tested:
            continue
        ways = [fit_way(model, seen, device, way) for way in WAYS]
        for sample in tested:
            total = sum(predicted(sample, *way) for way in ways)
            errors.setdefault(sample["part"], []).append(
                total / (sample["forward"][0] + sample["backward"][0]) - 1
            )
    return [Check(part, tuple(relative)) for part, relative in sorted(errors.items())]
