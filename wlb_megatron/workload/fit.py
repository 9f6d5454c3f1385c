"""Fits costs to a profile: attention, the rest of a layer, stage ends, optimizer, links.

Attention's are fitted separately for forward and backward:

* Calls of one shape that fill the device give a segment's time per query-key pair.
* Calls of all shapes give the extra cost of a call, a segment and a row of queries or keys.
* Whole shares of micro-batches give what the executor adds around a call on earlier keys.

The last two are non-negative least squares of relative errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.errors import WlbError
from wlb_megatron.workload.cost_model import Costs, Curve, TransferCost
from wlb_megatron.workload.kernel_table import HALF, TILE, KernelTable
from wlb_megatron.workload.profile import ProfiledModel

FloatArray = npt.NDArray[np.float64]
Sample = dict[str, Any]
Way = Literal["forward", "backward"]
WAYS: tuple[Way, Way] = ("forward", "backward")

LINKS = ("all_gather", "reduce_scatter", "all_to_all", "p2p")
FITTED = ("documents", "share")
UNMEASURED_LATENCY, UNMEASURED_RATE = 50_000.0, 370e9
"""Nanoseconds of an exchange each way, and bytes a second of NVLink, where one GPU alone was profiled."""


class Device(NamedTuple):
    """Its name, how many tiles it computes at once (multiprocessors), and whose kernels it ran."""

    name: str
    processors: int = 1
    backend: str = "cudnn"


def fit(model: ProfiledModel, samples: Sequence[Sample], device: Device) -> Costs:
    """Costs of what was measured. WlbError where too little was."""
    links = {name: link for name in LINKS if (link := _link(samples, name)) is not None}
    tables = {way: fit_attention(model, samples, device, way, links.get("all_to_all")) for way in WAYS}
    layer, ends = _curve(samples, "layer"), [_curve(samples, part) for part in ("embedding", "loss")]
    (optimizer,) = samples_of(samples, "optimizer")[:1] or missing("the optimizer")
    per_parameter = (optimizer["forward"][0] + optimizer["backward"][0]) / optimizer["sizes"]["parameters"]
    balanced, document = _work([tables[way] for way in WAYS], layer)
    return Costs(
        forward=tables["forward"],
        backward=tables["backward"],
        layer=layer,
        embedding=ends[0],
        loss=ends[1],
        optimizer=per_parameter,
        quadratic_at=balanced,
        per_document=document,
        links=links,
        **_hosts(samples, waits=model.experts is not None),
    )


def _work(tables: Sequence[KernelTable], layer: Curve) -> tuple[float, float]:
    """quadratic_at and per_document: a whole document's layer and attention, d + d*d / quadratic_at + per_document."""
    sizes = np.array([2**n for n in range(7, 18) if 2**n <= tables[0].queries[-1]], dtype=np.int64)
    times = sum(layer.slope()) * sizes + np.sum([table.diagonal_ns(sizes) for table in tables], axis=0)
    columns = np.stack([sizes, sizes.astype(np.float64) ** 2, np.ones(len(sizes))], axis=1)
    token, pair, document = least_squares(columns / times[:, None], np.ones(len(sizes)))
    if not (token > 0 and pair > 0):  # documents too short to separate the two: use the longest one's own
        whole = float(np.sum([table.diagonal_ns(sizes[-1:]) for table in tables]))
        token, pair, document = max(sum(layer.slope()), 1e-3), whole / float(sizes[-1]) ** 2, 0.0
    return float(token / pair), float(document / token)


def _curve(samples: Sequence[Sample], part: str) -> Curve:
    group = sorted(samples_of(samples, part), key=lambda s: s["sizes"]["tokens"])
    if len(group) < 2:
        missing(f"{part} at two token counts")
    forward, backward = (np.maximum.accumulate([float(s[way][0]) for s in group]) for way in WAYS)
    tokens = tuple(float(s["sizes"]["tokens"]) for s in group)
    return Curve(tokens=tokens, forward=tuple(forward.tolist()), backward=tuple(backward.tolist()))


def _hosts(samples: Sequence[Sample], *, waits: bool) -> dict[str, tuple[float, float]]:
    """Of Costs, what launching takes: medians over samples, each of which has its own quicker launches.

    waits: the host waits for a layer's routes, with few tokens least: of its samples the smallest counts.
    """

    def usual(group: Sequence[Sample]) -> FloatArray:
        launches = [[float(s.get(f"host_{way}", 0)) for way in WAYS] for s in group]
        return np.median(launches, axis=0) if launches else np.zeros(2)

    layers = sorted(samples_of(samples, "layer"), key=lambda s: s["sizes"]["tokens"])
    shares = samples_of(samples, "share")
    one_call, two_calls = (
        usual([s for s in shares if bool(s["sizes"]["rectangles"]) == cut]) for cut in (False, True)
    )
    if not any(one_call):  # all of the profile's shares see earlier keys
        one_call = two_calls
    host_times = {
        "host": usual(layers[:1] if waits else layers) + one_call,
        "host_second": np.maximum(two_calls - one_call, 0.0),
        "host_embedding": usual(samples_of(samples, "embedding")),
        "host_loss": usual(samples_of(samples, "loss")),
    }
    return {name: (float(both[0]), float(both[1])) for name, both in host_times.items()}


def _link(samples: Sequence[Sample], name: str) -> TransferCost | None:
    """Latency and time per byte, from the smallest size and from what the largest adds to it.

    Of a collective's buffer each rank has its part already: of 64 MiB over 2 ranks, 32 pass each GPU.
    """
    group = sorted(samples_of(samples, name), key=lambda s: s["sizes"]["bytes"])
    if len(group) < 2:
        return None
    ranks = group[0]["sizes"]["ranks"]
    share = 1.0 if name == "p2p" else (ranks - 1) / ranks
    first, last = group[0], group[-1]
    grown = (last["sizes"]["bytes"] - first["sizes"]["bytes"]) * share
    per_byte = max(last["forward"][0] - first["forward"][0], 1) / grown
    latency = first["forward"][0] - per_byte * first["sizes"]["bytes"] * share
    return TransferCost(latency=max(latency, 0.0), per_byte=per_byte)


class Overheads(NamedTuple):
    """What attention costs beside its pairs, in nanoseconds, as fields of a KernelTable: in the kernels a call, a
    segment, a row of its queries and keys; around them, in the executor, a share's call on earlier keys and each row
    of its queries and keys."""

    call: float
    segment: float
    query_row: float
    key_row: float
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
        **overheads._asdict(),
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


def leave_out(
    model: ProfiledModel, samples: Sequence[Sample], device: Device, folds: int = 8
) -> dict[str, FloatArray]:
    """By part, relative errors of predicted attention times (forward + backward) of samples that the fit has not seen:
    shares and documents, each predicted by a fit to those of other folds, and shapes that no fit is made to."""
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
    return {part: np.array(relative) for part, relative in sorted(errors.items())}


def pairs_table(
    model: ProfiledModel, grid: Sequence[Sample], device: Device, way: Way, times: Sequence[float]
) -> KernelTable:
    """A table of segments among as many as fill the device, from calls of one shape and what is counted of each.

    A call whose tiles do not fill the device counts with the share that they fill. Sizes between those measured take
    a rate between, on straight lines over logarithms; beyond them, the nearest.
    """
    rectangles: dict[int, dict[float, float]] = {}
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
    rectangle = _fill(rectangles, queries, ratios, by_keys=True)
    bottom_right = (
        _fill(masked, queries, ratios, by_keys=False) if masked else _bottom_right(rectangle, ratios)
    )
    sizes = sorted(diagonals)
    rates = np.interp(np.log(queries), np.log(sizes), [diagonals[size] for size in sizes])
    return KernelTable(
        device=device.name,
        heads=model.rank_heads,
        kv_heads=model.rank_kv_heads,
        head_dim=model.head_dim,
        queries=tuple(float(q) for q in queries),
        ratios=tuple(ratios),
        rectangle=rectangle,
        bottom_right=bottom_right,
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
    rates: dict[int, dict[float, float]], queries: Sequence[int], ratios: Sequence[float], *, by_keys: bool
) -> tuple[tuple[float, ...], ...]:
    """[a][b] times, from rates per pair at measured queries and keys (`by_keys`) or keys per query; between measured
    sizes on straight lines over logarithms of both."""
    known, rows = sorted(rates), []
    for q in queries:
        places = np.log([q * r if by_keys else r for r in ratios])
        lines = [
            np.interp(places, np.log(sorted(rates[k])), [rates[k][x] for x in sorted(rates[k])])
            for k in known
        ]
        between = (np.interp(np.log(q), np.log(known), column) for column in np.transpose(lines))
        rows.append(tuple(float(rate * q * q * r) for rate, r in zip(between, ratios, strict=True)))
    return tuple(rows)


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
