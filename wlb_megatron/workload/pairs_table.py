"""Builds the grids of a kernel table: times of segments by shape, from calls of one shape each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.errors import WlbError
from wlb_megatron.workload.kernel_table import TILE, KernelTable
from wlb_megatron.workload.profile import ProfiledModel

FloatArray = npt.NDArray[np.float64]
Sample = dict[str, Any]
Way = Literal["forward", "backward"]
WAYS: tuple[Way, Way] = ("forward", "backward")


class Device(NamedTuple):
    """Its name, how many tiles it computes at once (multiprocessors), and whose kernels it ran."""

    name: str
    processors: int = 1
    backend: str = "cudnn"


def pairs_table(
    model: ProfiledModel, grid: Sequence[Sample], device: Device, way: Way, times: Sequence[float]
) -> KernelTable:
    """A table of segments among as many as fill the device, from calls of one shape and what is counted of each.

    A call whose tiles do not fill the device counts with the share that they fill. Sizes between those measured take
    a rate between, on straight lines over logarithms; beyond them, the nearest.
    """
    rectangles: dict[int, dict[int, float]] = {}
    masked: dict[int, dict[float, float]] = {}
    diagonals: dict[int, float] = {}
    tile = 0.0
    for sample, ns in zip(grid, times, strict=True):
        if sample["part"] == "diagonal":
            ((size, copies),) = sample["sizes"]["diagonals"]
            diagonals[size] = ns / copies / (size * (size + TILE))
            continue
        rows, keys, copies = shape_of(sample)
        full = filled(model, sample, device, way)
        rate = ns * full / copies / rows / keys
        if sample["part"] == "bottom_right":
            masked.setdefault(rows, {})[keys / rows] = rate
            continue
        if way == "forward" and full < 1:
            tile = max(tile, ns / keys)
        rectangles.setdefault(rows, {})[keys] = rate
    if len(rectangles) < 2:
        missing("rectangles of two query counts")
    if len(diagonals) < 2:
        missing("diagonals of two sizes")
    queries = sorted({*rectangles, *diagonals})
    most = max(max(row) for row in rectangles.values())
    ratios = [2.0**n for n in range(-10, 12) if TILE / queries[-1] <= 2.0**n <= most / queries[0]]
    if masked:  # ratios 1 and 2 differ by half; a third of that is masked at 1.5
        ratios = sorted({*ratios, 1.5})
    filled_in = _fill(rectangles, queries, ratios)
    sizes = sorted(diagonals)
    rates = np.interp(np.log(queries), np.log(sizes), [diagonals[size] for size in sizes])
    return KernelTable(
        device=device.name,
        heads=model.rank_heads,
        kv_heads=model.rank_kv_heads,
        head_dim=model.head_dim,
        queries=tuple(float(q) for q in queries),
        ratios=tuple(ratios),
        rectangle=filled_in,
        bottom_right=_measured(masked, queries, ratios) if masked else _bottom_right(filled_in, ratios),
        diagonal=tuple(float(rate * q * (q + TILE)) for rate, q in zip(rates, queries, strict=True)),
        call=0.0,
        segment=0.0,
        query_row=0.0,
        key_row=0.0,
        tile_key=tile,
        exchange=0.0,
        exchange_row=0.0,
        forward_share=1.0 if way == "forward" else 0.0,
        backend=device.backend,
    )


def _fill(
    times: dict[int, dict[int, float]], queries: Sequence[int], ratios: Sequence[float]
) -> tuple[tuple[float, ...], ...]:
    """[a][b] times; the rate per pair between measured sizes on straight lines over logarithms of both."""
    known = sorted(times)
    keys = sorted({k for row in times.values() for k in row})
    rates = np.array(
        [
            np.interp(np.log(keys), np.log(sorted(times[q])), [times[q][k] for k in sorted(times[q])])
            for q in known
        ]
    )
    rows = []
    for q in queries:
        by_keys = [float(np.interp(np.log(q), np.log(known), rates[:, j])) for j in range(len(keys))]
        rate = np.interp(np.log([q * r for r in ratios]), np.log(keys), by_keys)
        rows.append(tuple(float(x * q * q * r) for x, r in zip(rate, ratios, strict=True)))
    return tuple(rows)


def _measured(
    times: dict[int, dict[float, float]], queries: Sequence[int], ratios: Sequence[float]
) -> tuple[tuple[float, ...], ...]:
    """[a][b] times of bottom-right causal calls; the rate per pair between measured ones on straight lines over
    logarithms of keys per query, then of queries."""
    known = sorted(times)
    measured = [
        np.interp(np.log(ratios), np.log(sorted(times[q])), [times[q][r] for r in sorted(times[q])])
        for q in known
    ]
    columns = [np.interp(np.log(queries), np.log(known), column) for column in np.array(measured).T]
    return tuple(
        tuple(float(column[i] * q * q * r) for column, r in zip(columns, ratios, strict=True))
        for i, q in enumerate(queries)
    )


def _bottom_right(
    rows: tuple[tuple[float, ...], ...], ratios: Sequence[float]
) -> tuple[tuple[float, ...], ...]:
    """Where none was measured, as cuDNN's are: a bottom-right causal call computes its masked half in backward, and in
    forward only the diagonal's tiles."""
    shares = [1 - min(0.5 / (3.5 * max(r, 1)), 0.5) for r in ratios]
    return tuple(tuple(t * share for t, share in zip(row, shares, strict=True)) for row in rows)


def filled(model: ProfiledModel, sample: Sample, device: Device, way: Way) -> float:
    """Share of the device that a call's tiles fill: of queries at once in a forward, of keys in a backward."""
    queries, keys, copies = shape_of(sample)
    tiles = -(-(queries if way == "forward" else keys) // TILE) * copies * model.rank_heads
    return min(1.0, tiles / device.processors)


def shape_of(sample: Sample) -> tuple[int, int, int]:
    """Queries, keys and copies of a call of rectangles, or bottom-right ones, of one shape."""
    sizes = sample["sizes"]
    ((queries, keys, copies),) = sizes.get("bottom_right") or sizes["rectangles"]
    return queries, keys, copies


def samples_of(samples: Sequence[Sample], part: str) -> list[Sample]:
    return [sample for sample in samples if sample["part"] == part]


def missing(what: str) -> Any:
    raise WlbError(f"the profile lacks {what}: profile again with a larger --budget")
