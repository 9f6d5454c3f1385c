"""What the profiler measures: the grid of shapes and sizes, chosen only by the model's shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.lengths import long_tailed
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import shard
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.slots import padded
from wlb_megatron.workload.kernel_table import TILE
from wlb_megatron.workload.profile import ProfiledModel

MOST_ROWS = 1 << 19
"""Queries, and keys, of a call at most."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What a profile measures.

    * queries, keys: sizes of rectangles. diagonals: tokens of causal segments. held_out: shapes no fit sees.
    * ratios: keys per query of bottom-right causal segments, with as many queries as rectangles have.
    * documents: (tokens, copies) for calls of unlike ones.
    * windows: tokens of micro-batches that are cut over `cps` ranks as each of KINDS, `samples` times. One share of
      each is measured.
    * tokens, loss_tokens: sizes for a layer and for the model's ends. bytes: sizes for collectives.
    * most_flops: limit of a call, forward + backward. seconds: time for each point.
    * tiles: number that fills a device: 2112 are 16 for each of an H100's 132 multiprocessors, so that the last ones
      weigh little.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    diagonals: tuple[int, ...]
    ratios: tuple[float, ...]
    documents: tuple[tuple[tuple[int, int], ...], ...]
    windows: tuple[int, ...]
    cps: tuple[int, ...]
    tokens: tuple[int, ...]
    loss_tokens: tuple[int, ...]
    bytes: tuple[int, ...]
    most_flops: float
    seconds: float
    samples: int = 1
    held_out: int = 0
    tiles: int = 2112


_K = 1024
KINDS = ("per-sequence", "per-document", "hybrid")
GRIDS = {
    "full": Grid(
        queries=tuple(128 * 2**n for n in range(9)),
        keys=tuple(128 * 2**n for n in range(11)),
        diagonals=(128, 256, 512, _K, 2 * _K, 4 * _K, 8 * _K, 16 * _K, 32 * _K, 64 * _K),
        ratios=(1, 1.5, 2, 4, 8, 16, 64),
        documents=(
            ((16, 256),),
            ((16, 2048),),
            ((200, 512),),
            ((16 * _K, 1), (20, 64)),
            ((16 * _K, 1), (20, 512)),
            ((8 * _K, 2), (600, 30)),
        ),
        windows=(32 * _K, 64 * _K, 128 * _K),
        cps=(2, 4, 8),
        tokens=(64, 512, 2 * _K, 8 * _K, 16 * _K, 32 * _K),
        loss_tokens=(64, 512, 2 * _K, 8 * _K),
        bytes=tuple(4**n * 64 * _K for n in range(7)),
        most_flops=8e13,
        seconds=0.12,
        samples=2,
        held_out=24,
    ),
    "reduced": Grid(
        queries=(128, 512, 2 * _K, 8 * _K, 32 * _K),
        keys=(128, 512, 2 * _K, 8 * _K, 32 * _K),
        diagonals=(128, 256, 512, _K, 2 * _K, 4 * _K, 8 * _K, 16 * _K, 32 * _K),
        ratios=(1, 1.5, 2, 4, 16),
        documents=(((16, 1024),), ((200, 512),), ((16 * _K, 1), (20, 256))),
        windows=(32 * _K, 48 * _K),
        cps=(1, 2),
        tokens=(64, 2 * _K, 8 * _K, 16 * _K, 32 * _K),
        loss_tokens=(64, 2 * _K, 8 * _K),
        bytes=tuple(4**n * 64 * _K for n in range(7)),
        most_flops=8e13,
        seconds=0.08,
        samples=2,
        held_out=8,
    ),
    "tiny": Grid(
        queries=(128, 256),
        keys=(128, 512),
        diagonals=(128, 256, 512),
        ratios=(1, 2),
        documents=(((16, 8),), ((200, 1), (20, 4))),
        windows=(512,),
        cps=(1, 2),
        tokens=(16, 128, 512),
        loss_tokens=(16, 256),
        bytes=(64 * _K, 256 * _K),
        most_flops=1e10,
        seconds=0.02,
        tiles=8,
        held_out=2,
    ),
}


@dataclass(frozen=True)
class Point:
    """One thing to measure. part: its name. sizes: JSON-able, what the fit needs to know of it.

    Attention's sizes are "diagonals" [[queries, copies], ..] and "rectangles" [[queries, keys, copies], ..]; or of one
    part "bottom_right", as of rectangles. plan and rank say which share of a micro-batch runs, through the executor.
    """

    part: str
    sizes: dict[str, Any]
    plan: ShardPlan | None = field(default=None, compare=False)
    rank: int = 0


def attention_points(grid: Grid, model: ProfiledModel) -> Iterator[Point]:
    """Rectangles, diagonals and bottom-right segments of one shape, as many as fill a device; calls of unlike
    documents; whole shares."""
    yield _segments("call", diagonals=[(1, 1)])
    for queries in grid.queries:
        for keys in grid.keys:
            copies = _copies(min(queries, keys), max(queries, keys), grid, model)
            if _flops(queries * keys * copies, model) <= grid.most_flops:
                yield _segments("rectangle", rectangles=[(queries, keys, copies)])
    for size in grid.diagonals:
        copies = _copies(size, size, grid, model)
        if _flops(size * size * copies / 2, model) <= grid.most_flops:
            yield _segments("diagonal", diagonals=[(size, copies)])
    for queries in grid.queries:
        for keys in (round(queries * ratio) for ratio in grid.ratios):
            copies = _copies(queries, keys, grid, model)
            if keys <= grid.keys[-1] and _flops(queries * keys * copies, model) <= grid.most_flops:
                yield _segments("bottom_right", bottom_right=[(queries, keys, copies)])
    for documents in grid.documents:
        yield _segments("documents", diagonals=documents)
    yield from _shares(grid, model)
    yield from _held_out(grid, model)


def _held_out(grid: Grid, model: ProfiledModel) -> Iterator[Point]:
    """Rectangles and diagonals of seeded sizes between those of the grid, on a logarithmic scale."""
    rng = np.random.default_rng(13)
    for number in range(grid.held_out):
        queries, keys = (
            int(np.exp(rng.uniform(np.log(side[0]), np.log(side[-1])))) for side in (grid.queries, grid.keys)
        )
        copies = _copies(min(queries, keys), max(queries, keys), grid, model)
        if number % 3 == 0:
            copies = _copies(queries, queries, grid, model)
            yield _segments("held_out", diagonals=[(queries, copies)])
        elif _flops(queries * keys * copies, model) <= grid.most_flops:
            yield _segments("held_out", rectangles=[(queries, keys, copies)])


def _segments(part: str, **sizes: Any) -> Point:
    return Point(
        part,
        {"diagonals": [], "rectangles": []} | {name: list(map(list, rows)) for name, rows in sizes.items()},
    )


def _copies(short_side: int, long_side: int, grid: Grid, model: ProfiledModel) -> int:
    tiles = -(-short_side // TILE) * model.rank_heads
    return max(1, min(-(-grid.tiles // tiles), MOST_ROWS // long_side))


def _flops(pairs: float, model: ProfiledModel) -> float:
    """Forward + backward."""
    return 3.5 * 4 * pairs * model.rank_heads * model.head_dim


def _shares(grid: Grid, model: ProfiledModel) -> Iterator[Point]:
    """Shares of seeded long-tailed micro-batches, and of one that is a single document."""
    rng = np.random.default_rng(7)
    for window in grid.windows:
        for cp in grid.cps:
            for number, kind in enumerate(KINDS * grid.samples):
                lengths = _micro_batch(window, int(rng.integers(1 << 16)), single=number == 0 and cp == 2)
                plan = shard(padded(lengths, cp), cp, kind)
                rank = int(rng.integers(cp))
                point = _share(plan, rank, cp, kind)
                pairs = sum(q * q * n / 2 for q, n in point.sizes["diagonals"])
                pairs += sum(q * k * n for q, k, n in point.sizes["rectangles"])
                if _flops(pairs, model) <= grid.most_flops:
                    yield point


def _micro_batch(window: int, seed: int, single: bool) -> npt.NDArray[np.int64]:
    if single:
        return np.array([window], dtype=np.int64)
    lengths = long_tailed(window, 4096, seed)
    first = int(np.searchsorted(np.cumsum(lengths), window))
    documents = lengths[: first + 1].copy()
    documents[-1] -= documents.sum() - window
    return documents[documents > 0]


def _share(plan: ShardPlan, rank: int, cp: int, kind: str) -> Point:
    layout = attention_layout(plan, rank)
    diagonals = [[int(q), 1] for q in np.diff(layout.diagonals.cu_seqlens_q)]
    rectangles, call = [], layout.rectangles
    if call is not None:
        pairs = zip(np.diff(call.cu_seqlens_q), np.diff(call.cu_seqlens_kv), strict=True)
        rectangles = [[int(q), int(k), 1] for q, k in pairs]
    sizes = {"diagonals": diagonals, "rectangles": rectangles, "cp": cp, "kind": kind, "tokens": plan.tokens}
    return Point("share", sizes, plan, rank)
