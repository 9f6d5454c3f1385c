"""Attention's costs from a profile's samples.

Of each way (forward, backward): the time per query-key pair of a segment comes from calls of one shape that fill the
device; what a call, a segment and a row of queries or keys cost beside their pairs is fitted to whole shares of
micro-batches and to calls of many small documents, by least squares of relative errors, none negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.errors import WlbError
from wlb_megatron.workload.costs import Link
from wlb_megatron.workload.kernel_table import TILE, KernelTable
from wlb_megatron.workload.profile import ProfiledModel

FloatArray = npt.NDArray[np.float64]
Sample = dict[str, Any]
Way = Literal["forward", "backward"]
WAYS: tuple[Way, Way] = ("forward", "backward")
FITTED = ("documents", "share")
UNMEASURED_LATENCY, UNMEASURED_RATE = 50_000.0, 370e9
"""Nanoseconds of an exchange each way, and bytes a second of NVLink, where one GPU alone was profiled."""


class Device(NamedTuple):
    """Its name, and how many tiles it computes at once (multiprocessors)."""

    name: str
    processors: int = 1


class Extras(NamedTuple):
    """What attention costs beside its pairs, in nanoseconds: a call, a segment, a row of its queries and keys in the
    kernels; and such rows once more where the executor moves them."""

    call: float
    segment: float
    query: float
    key: float
    moved_query: float
    moved_key: float


def predicted(sample: Sample, table: KernelTable, extras: Extras) -> float:
    """Nanoseconds of an attention sample, one way. table: of the pairs alone."""
    return _pairs_ns(sample, table) + float(np.dot(_counts(sample), extras))


def fit_attention(
    model: ProfiledModel, samples: Sequence[Sample], device: Device, way: Way, exchange: Link | None
) -> KernelTable:
    """What a share of a micro-batch costs: rows count in the kernels and in the executor."""
    table, extras = fit_way(model, samples, device, way)
    row = 2 * 2 * model.rank_kv_heads * model.head_dim  # K and V, or their gradients, in 2 bytes
    per_byte = exchange.per_byte if exchange else 1e9 / UNMEASURED_RATE
    return replace(
        table,
        call=extras.call,
        segment=extras.segment,
        query_row=extras.query + extras.moved_query,
        key_row=extras.key + extras.moved_key,
        exchange=exchange.latency if exchange else UNMEASURED_LATENCY,
        exchange_row=row * per_byte,
    )


def fit_way(
    model: ProfiledModel, samples: Sequence[Sample], device: Device, way: Way
) -> tuple[KernelTable, Extras]:
    """The extras that explain shares and documents, and the table of what calls of one shape take without them.

    A prediction is linear in the extras: each adds its own count to a sample, and takes from the table what it adds
    to the calls that the table is made of.
    """
    grid = [s for s in samples if s["part"] in ("rectangle", "diagonal")]
    fitted = [s for s in samples if s["part"] in FITTED]
    (tiny,) = samples_of(samples, "call")[:1] or missing("an attention call")
    extras = np.array([float(tiny[way][0]), 0.0, 0.0, 0.0, 0.0, 0.0])
    if fitted:
        measured = np.array([s[way][0] for s in fitted], dtype=np.float64)
        whole = _pairs_table(model, grid, device, way, [float(s[way][0]) for s in grid])
        kernel = np.array([_pairs_ns(s, whole) for s in fitted])
        columns = np.array([_counts(s) for s in fitted])
        for at in range(4):
            inside = [_counts(s)[at] * _FINE for s in grid]
            part = _pairs_table(model, grid, device, way, inside)
            columns[:, at] -= [_pairs_ns(s, part) / _FINE for s in fitted]
        extras = least_squares(columns / measured[:, None], (measured - kernel) / measured)
    bare = [s[way][0] - float(np.dot(_counts(s), extras)) for s in grid]
    # Some of a call's time is its pairs', whatever the extras say of it.
    kept = [max(ns, 0.05 * s[way][0]) for ns, s in zip(bare, grid, strict=True)]
    return _pairs_table(model, grid, device, way, kept), Extras(*extras.tolist())


_FINE = 1e6
"""Tables hold whole nanoseconds: counts are scaled, so that they are not rounded away."""


def _pairs_table(
    model: ProfiledModel, grid: Sequence[Sample], device: Device, way: Way, times: Sequence[float]
) -> KernelTable:
    """A table of segments among as many as fill the device, from calls of one shape and what is counted of each.

    A call whose tiles do not fill the device counts with the share that they fill. Sizes between those measured take
    a rate between, on straight lines over logarithms; beyond them, the nearest.
    """
    rectangles: dict[int, dict[int, float]] = {}
    diagonals: dict[int, float] = {}
    tile = 0.0
    for sample, ns in zip(grid, times, strict=True):
        if sample["part"] == "diagonal":
            ((size, copies),) = sample["sizes"]["diagonals"]
            diagonals[size] = ns / copies / (size * (size + TILE))
            continue
        ((queries, keys, copies),) = sample["sizes"]["rectangles"]
        # A forward goes over tiles of queries at once, a backward over tiles of keys.
        tiles = -(-(queries if way == "forward" else keys) // TILE) * copies * model.rank_heads
        full = min(1.0, tiles / device.processors)
        if way == "forward" and full < 1:
            tile = max(tile, ns / keys)
        rectangles.setdefault(queries, {})[keys] = ns * full / copies / queries / keys
    if len(rectangles) < 2:
        missing("rectangles of two query counts")
    if len(diagonals) < 2:
        missing("diagonals of two sizes")
    queries = sorted({*rectangles, *diagonals})
    most = max(max(row) for row in rectangles.values())
    ratios = [2.0**n for n in range(-10, 12) if TILE / queries[-1] <= 2.0**n <= most / queries[0]]
    rows = _fill(rectangles, queries, ratios)
    sizes = sorted(diagonals)
    rates = np.interp(np.log(queries), np.log(sizes), [diagonals[size] for size in sizes])
    return KernelTable(
        device=device.name,
        heads=model.rank_heads,
        kv_heads=model.rank_kv_heads,
        head_dim=model.head_dim,
        queries=tuple(float(q) for q in queries),
        ratios=tuple(ratios),
        rectangle=rows,
        bottom_right=_bottom_right(rows, ratios),
        diagonal=tuple(float(rate * q * (q + TILE)) for rate, q in zip(rates, queries, strict=True)),
        call=0.0,
        segment=0.0,
        query_row=0.0,
        key_row=0.0,
        tile_key=tile,
        exchange=0.0,
        exchange_row=0.0,
        forward_share=1.0 if way == "forward" else 0.0,
    )


def _fill(
    found: dict[int, dict[int, float]], queries: Sequence[int], ratios: Sequence[float]
) -> tuple[tuple[float, ...], ...]:
    """[a][b] times; the rate per pair between measured sizes on straight lines over logarithms of both."""
    known = sorted(found)
    keys = sorted({k for row in found.values() for k in row})
    rates = np.array(
        [
            np.interp(np.log(keys), np.log(sorted(found[q])), [found[q][k] for k in sorted(found[q])])
            for q in known
        ]
    )
    rows = []
    for q in queries:
        by_keys = [float(np.interp(np.log(q), np.log(known), rates[:, j])) for j in range(len(keys))]
        rate = np.interp(np.log([q * r for r in ratios]), np.log(keys), by_keys)
        rows.append(tuple(float(x * q * q * r) for x, r in zip(rate, ratios, strict=True)))
    return tuple(rows)


def _bottom_right(
    rows: tuple[tuple[float, ...], ...], ratios: Sequence[float]
) -> tuple[tuple[float, ...], ...]:
    """A bottom-right causal call computes its masked half in backward, and in forward only the diagonal's tiles."""
    shares = [1 - min(0.5 / (3.5 * max(r, 1)), 0.5) for r in ratios]
    return tuple(tuple(t * share for t, share in zip(row, shares, strict=True)) for row in rows)


def _pairs_ns(sample: Sample, table: KernelTable) -> float:
    diagonals = np.array(sample["sizes"]["diagonals"], dtype=np.int64).reshape(-1, 2)
    rectangles = np.array(sample["sizes"]["rectangles"], dtype=np.int64).reshape(-1, 3)
    total = float((table.diagonal_ns(diagonals[:, 0]) * diagonals[:, 1]).sum())
    return total + float((table.rectangle_ns(rectangles[:, 0], rectangles[:, 1]) * rectangles[:, 2]).sum())


def _counts(sample: Sample) -> FloatArray:
    """float[6]: what of Extras a sample has. Only a share goes through the executor, which moves its rows."""
    diagonals, rectangles = sample["sizes"]["diagonals"], sample["sizes"]["rectangles"]
    own = sum(q * n for q, n in diagonals)
    queries = own + sum(q * n for q, _, n in rectangles)
    keys = own + sum(k * n for _, k, n in rectangles)
    segments = sum(n for *_, n in diagonals) + sum(n for *_, n in rectangles)
    moved = sample["part"] == "share"
    calls = bool(diagonals) + bool(rectangles)
    return np.array([calls, segments, queries, keys, moved * queries, moved * keys], dtype=np.float64)


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
            rest = values - part @ solved
            if (solved >= 0).all() and rest @ rest < least:
                best = np.zeros(columns.shape[1])
                best[list(chosen)] = solved
                least = float(rest @ rest)
    return best


def samples_of(samples: Sequence[Sample], part: str) -> list[Sample]:
    return [sample for sample in samples if sample["part"] == part]


def missing(what: str) -> Any:
    raise WlbError(f"the profile lacks {what}: profile again with a larger --budget")
