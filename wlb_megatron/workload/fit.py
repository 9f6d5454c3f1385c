"""Costs from a profile's samples, and how far they are from samples that the fit has not seen.

Attention of each way (forward, backward): the time per query-key pair of a segment comes from calls of one shape that
fill the device; what a call, a segment and a row of queries or keys cost beside their pairs is fitted to whole shares
of micro-batches and to calls of many small documents, by least squares of relative errors, none negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.errors import WlbError
from wlb_megatron.workload.costs import Costs, Curve, Link
from wlb_megatron.workload.kernel_table import TILE, KernelTable
from wlb_megatron.workload.profile import ProfiledModel

FloatArray = npt.NDArray[np.float64]


class Device(NamedTuple):
    """Its name, and how many tiles it computes at once (multiprocessors)."""

    name: str
    processors: int = 1


Sample = dict[str, Any]
Way = Literal["forward", "backward"]
WAYS: tuple[Way, Way] = ("forward", "backward")
LINKS = ("all_gather", "reduce_scatter", "all_to_all", "p2p")
FITTED = ("documents", "share")
UNMEASURED_LATENCY, UNMEASURED_RATE = 50_000.0, 370e9
"""Nanoseconds of an exchange each way, and bytes a second of NVLink, where one GPU alone was profiled."""


def fit(model: ProfiledModel, samples: Sequence[Sample], device: Device) -> Costs:
    """Costs of what was measured. WlbError where too little was."""
    links = {name: link for name in LINKS if (link := _link(samples, name)) is not None}
    tables = {way: _attention(model, samples, device, way, links.get("all_to_all")) for way in WAYS}
    layer, ends = _curve(samples, "layer"), [_curve(samples, part) for part in ("embedding", "loss")]
    (optimizer,) = _of(samples, "optimizer")[:1] or _missing("the optimizer")
    each = (optimizer["forward"][0] + optimizer["backward"][0]) / optimizer["sizes"]["parameters"]
    balanced, document = _work([tables[way] for way in WAYS], layer)
    return Costs(
        forward=tables["forward"],
        backward=tables["backward"],
        layer=layer,
        embedding=ends[0],
        loss=ends[1],
        optimizer=each,
        quadratic_at=balanced,
        per_document=document,
        host=_host(samples),
        links=links,
    )


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
        held = {id(s) for at, s in enumerate(fitted) if at % folds == fold}
        seen = [s for s in samples if id(s) not in held]
        tested = [s for s in samples if id(s) in held or (fold == 0 and s["part"] == "held_out")]
        if not tested:
            continue
        ways = [_fit_way(model, seen, device, way) for way in WAYS]
        for sample in tested:
            told = sum(predicted(sample, *way) for way in ways)
            errors.setdefault(sample["part"], []).append(
                told / (sample["forward"][0] + sample["backward"][0]) - 1
            )
    return [Check(part, tuple(found)) for part, found in sorted(errors.items())]


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


def _attention(
    model: ProfiledModel, samples: Sequence[Sample], device: Device, way: Way, exchange: Link | None
) -> KernelTable:
    """What a share of a micro-batch costs: rows count in the kernels and in the executor."""
    table, extras = _fit_way(model, samples, device, way)
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


def _fit_way(
    model: ProfiledModel, samples: Sequence[Sample], device: Device, way: Way
) -> tuple[KernelTable, Extras]:
    """The extras that explain shares and documents, and the table of what calls of one shape take without them.

    A prediction is linear in the extras: each adds its own count to a sample, and takes from the table what it adds
    to the calls that the table is made of.
    """
    grid = [s for s in samples if s["part"] in ("rectangle", "diagonal")]
    fitted = [s for s in samples if s["part"] in FITTED]
    (tiny,) = _of(samples, "call")[:1] or _missing("an attention call")
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
        extras = _least_squares(columns / measured[:, None], (measured - kernel) / measured)
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
        _missing("rectangles of two query counts")
    if len(diagonals) < 2:
        _missing("diagonals of two sizes")
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


def _work(tables: Sequence[KernelTable], layer: Curve) -> tuple[float, float]:
    """quadratic_at and per_document: a whole document's layer and attention, d + d*d / quadratic_at + per_document."""
    sizes = np.array([2**n for n in range(7, 18) if 2**n <= tables[0].queries[-1]], dtype=np.int64)
    times = sum(layer.slope()) * sizes + np.sum([table.diagonal_ns(sizes) for table in tables], axis=0)
    columns = np.stack([sizes, sizes.astype(np.float64) ** 2, np.ones(len(sizes))], axis=1)
    token, pair, document = _least_squares(columns / times[:, None], np.ones(len(sizes)))
    if not (token > 0 and pair > 0):  # documents too short to tell them apart: the longest one's own
        whole = float(np.sum([table.diagonal_ns(sizes[-1:]) for table in tables]))
        token, pair, document = max(sum(layer.slope()), 1e-3), whole / float(sizes[-1]) ** 2, 0.0
    return float(token / pair), float(document / token)


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


def _least_squares(columns: FloatArray, values: FloatArray) -> FloatArray:
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


def _curve(samples: Sequence[Sample], part: str) -> Curve:
    group = sorted(_of(samples, part), key=lambda s: s["sizes"]["tokens"])
    if len(group) < 2:
        _missing(f"{part} at two token counts")
    forward, backward = (np.maximum.accumulate([float(s[way][0]) for s in group]) for way in WAYS)
    tokens = tuple(float(s["sizes"]["tokens"]) for s in group)
    return Curve(tokens=tokens, forward=tuple(forward.tolist()), backward=tuple(backward.tolist()))


def _host(samples: Sequence[Sample]) -> tuple[float, float]:
    """To launch a layer: the cheapest layer and the cheapest share with both calls seen."""

    def least(part: str, way: str) -> float:
        return min((float(s.get(f"host_{way}", 0)) for s in _of(samples, part)), default=0.0)

    return tuple(least("layer", way) + least("share", way) for way in WAYS)  # type: ignore[return-value]


def _link(samples: Sequence[Sample], name: str) -> Link | None:
    """Latency and time per byte, from the smallest size and from what the largest adds to it."""
    group = sorted(_of(samples, name), key=lambda s: s["sizes"]["bytes"])
    if len(group) < 2:
        return None
    first, last = group[0], group[-1]
    grown = last["sizes"]["bytes"] - first["sizes"]["bytes"]
    per_byte = max(last["forward"][0] - first["forward"][0], 1) / grown
    return Link(latency=max(first["forward"][0] - per_byte * first["sizes"]["bytes"], 0.0), per_byte=per_byte)


def _of(samples: Sequence[Sample], part: str) -> list[Sample]:
    return [sample for sample in samples if sample["part"] == part]


def _missing(what: str) -> Any:
    raise WlbError(f"the profile lacks {what}: profile again with a larger --budget")
