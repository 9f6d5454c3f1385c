"""Predicts the time of attention kernels and of the key exchange, forward + backward, in integer nanoseconds.

A segment of q queries is computed by a diagonal (causal, q x q), a rectangle (q x k earlier keys, no mask), or one
bottom-right causal call (q x k, where the queries are the last of the keys). Each shape has a table of measured times
of one segment in a call that fills the device. Between grid points, the time per query-key pair is interpolated in
queries and in keys per query.

Ranks must choose alike. So only + - x / are used, which IEEE fixes bit for bit on every host (unlike logarithms), and
each segment's time is rounded before any sum.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

VERSION = 1
TABLES = Path(__file__).resolve().parent / "tables"
"""Folder of the built-in tables, NAME.json each, written by scripts/builtin_tables.py: bf16, 8 query heads, 2 KV
heads, d=128. Each names what it was measured with. Names of FlashAttention-4's tables end in -fa4."""
TILE = 128
"""Rows of queries, or of keys, that a kernel computes together. A segment of 1 row costs as much as one of 128."""
HALF = 64
"""Granularity in rows at which a diagonal's time is counted: backward skips a half tile if the mask hides all of it."""


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Times in nanoseconds of one layer's attention on one device: forward + backward, or one of them.

    * backend: the measured kernels: cudnn, fa4 (FlashAttention-4) or torch.
    * heads, kv_heads, head_dim: the measured shape, of one tensor-parallel rank.
    * queries: a ascending query counts, multiples of TILE. ratios: b ascending keys per query.
    * rectangle, bottom_right: [a][b] time of a segment of queries[i] x (queries[i] * ratios[j]) rows; diagonal: [a].
    * call: launch and fixed kernels of a call. segment: one more segment in a call.
    * query_row, key_row: work done once per row of a segment's queries and keys (fills, conversions, head
      reductions).
    * second_call, moved_query, moved_key: what the executor adds to a rank's call on earlier keys, and to each row of
      its rectangles' queries and keys, which it copies there and then merges or returns.
    * tile_key: forward time of one tile of query rows, per key. A call takes at least its longest tile.
    * exchange: latency of moving keys there and gradients back. exchange_row: per key row from another rank.
    * forward_share: the forward's share of a call's time; 1 in a table of forwards.
    """

    device: str
    heads: int
    kv_heads: int
    head_dim: int
    queries: tuple[float, ...]
    ratios: tuple[float, ...]
    rectangle: tuple[tuple[float, ...], ...]
    bottom_right: tuple[tuple[float, ...], ...]
    diagonal: tuple[float, ...]
    call: float
    segment: float
    query_row: float
    key_row: float
    tile_key: float
    exchange: float
    exchange_row: float
    second_call: float = 0.0
    moved_query: float = 0.0
    moved_key: float = 0.0
    forward_share: float = 1 / 3.5
    backend: str = "cudnn"

    def __post_init__(self) -> None:
        a, b = len(self.queries), len(self.ratios)
        if min(a, b) < 2 or any(list(axis) != sorted(axis) for axis in (self.queries, self.ratios)):
            raise ValueError("a kernel table needs at least two ascending queries and two ascending ratios")
        if any(q % TILE or q <= 0 for q in self.queries):
            raise ValueError(f"a kernel table's queries must be positive multiples of {TILE}")
        for name in ("rectangle", "bottom_right"):
            grid = getattr(self, name)
            if len(grid) != a or any(len(row) != b for row in grid):
                raise ValueError(f"{name} must have {a} rows (queries) of {b} times (ratios)")
        if len(self.diagonal) != a:
            raise ValueError(f"diagonal must have {a} times, one for each of queries")
        if min(min(map(min, self.rectangle)), min(map(min, self.bottom_right)), min(self.diagonal)) <= 0:
            raise ValueError("a kernel table's times must be positive nanoseconds")

    def scaled(self, *, heads: int, kv_heads: int, head_dim: int) -> KernelTable:
        """For another shape of model, by FLOPs and bytes. heads and kv_heads: one tensor-parallel rank's."""
        work = heads * head_dim / (self.heads * self.head_dim)
        return replace(
            self,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rectangle=tuple(tuple(ns * work for ns in row) for row in self.rectangle),
            bottom_right=tuple(tuple(ns * work for ns in row) for row in self.bottom_right),
            diagonal=tuple(ns * work for ns in self.diagonal),
            segment=self.segment * heads / self.heads,
            query_row=self.query_row * work,
            key_row=self.key_row * work,
            moved_query=self.moved_query * work,
            moved_key=self.moved_key * work,
            tile_key=self.tile_key * head_dim / self.head_dim,
            exchange_row=self.exchange_row * kv_heads * head_dim / (self.kv_heads * self.head_dim),
        )

    def rectangle_ns(self, queries: IntArray, keys: IntArray) -> IntArray:
        """int64[n]: ns of each segment whose keys are all earlier than its queries, with the rows moved for it."""
        moved = np.rint(self.moved_query * queries + self.moved_key * keys).astype(np.int64)
        return self._between(self._rates[0], queries, keys) + moved

    def bottom_right_ns(self, queries: IntArray, keys: IntArray) -> IntArray:
        """int64[n]: ns of each segment whose queries are the last of its keys."""
        return self._between(self._rates[1], queries, keys)

    def diagonal_ns(self, queries: IntArray) -> IntArray:
        """int64[n]: ns of each segment on its own keys only."""
        rows = _tiled(queries, HALF)
        at, weight = _place(self._grid[0], rows)
        rate = self._rates[2]
        rate = rate[at] + weight * (rate[at + 1] - rate[at])
        return self._with_rows(rate * rows * (rows + TILE), queries, queries)

    def cut_ns(
        self, whole_ns: npt.ArrayLike, lengths: IntArray, ranks: npt.ArrayLike, prefixes: npt.ArrayLike = 0
    ) -> FloatArray:
        """ns of documents on each of the ranks that they are cut over in causal pairs, by `whole_ns` on one rank.
        prefixes: earlier tokens that they attend to."""
        degree = np.asarray(ranks)
        chunk = -(-lengths // (2 * degree))
        tiles = -(-chunk // TILE) * TILE / np.maximum(chunk, 1)
        keys = prefixes + (2 * degree - 1) * lengths // (2 * degree)
        return np.asarray(whole_ns) / degree * tiles + 2 * self.segment + self.earlier_key * keys

    @property
    def earlier_call(self) -> float:
        """The part of a rank's call on earlier keys that does not depend on its segments (ns)."""
        return self.call + self.second_call

    @property
    def earlier_key(self) -> float:
        """The cost of each row of keys in such a call (ns)."""
        return self.key_row + self.moved_key

    @cached_property
    def _grid(self) -> tuple[FloatArray, FloatArray]:
        return np.array(self.queries, dtype=np.float64), np.array(self.ratios, dtype=np.float64)

    @cached_property
    def _rates(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Time per query-key pair at each grid point, of rectangle, bottom-right and diagonal."""
        q, r = self._grid
        pairs = q[:, None] * q[:, None] * r
        return (
            np.array(self.rectangle) / pairs,
            np.array(self.bottom_right) / pairs,
            self.diagonal / (q * (q + TILE)),
        )

    def _with_rows(self, kernel: FloatArray, queries: IntArray, keys: IntArray) -> IntArray:
        ns = kernel + self.segment + self.query_row * queries + self.key_row * keys
        return np.rint(ns).astype(np.int64)

    def _between(self, rate: FloatArray, queries: IntArray, keys: IntArray) -> IntArray:
        rows, columns = _tiled(queries), _tiled(keys)
        i, u = _place(self._grid[0], rows)
        j, v = _place(self._grid[1], columns / rows)
        low = rate[i, j] + v * (rate[i, j + 1] - rate[i, j])
        high = rate[i + 1, j] + v * (rate[i + 1, j + 1] - rate[i + 1, j])
        return self._with_rows((low + u * (high - low)) * rows * columns, queries, keys)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(path: str | Path) -> KernelTable:
        """Read a measured table. Raises ValueError, naming the file, if it is damaged or of another version."""
        again = "measure the device again"
        try:
            table = json.loads(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"cannot read kernel table {path}: {error.strerror}") from None
        except ValueError:
            raise ValueError(f"kernel table {path} is not JSON; {again}") from None
        if not isinstance(table, dict) or table.pop("version", None) != VERSION:
            raise ValueError(f"kernel table {path} is not of version {VERSION}; {again}")
        table.pop("measured", None)  # for readers of the file
        names = {field.name for field in fields(KernelTable)}
        if set(table) != names:
            wrong = ", ".join(sorted(names.symmetric_difference(table)))
            raise ValueError(f"kernel table {path} lacks, or should not have: {wrong}; {again}")
        try:
            return KernelTable(**frozen(table))
        except (TypeError, ValueError) as error:
            raise ValueError(f"kernel table {path}: {error}; {again}") from None


@cache
def builtin_names() -> tuple[str, ...]:
    """Names of the built-in tables, in alphabetical order."""
    return tuple(sorted(path.stem for path in TABLES.glob("*.json")))


@cache
def builtin(name: str) -> KernelTable:
    """A built-in table, one of builtin_names."""
    return KernelTable.from_json(TABLES / f"{name}.json")


def h100() -> KernelTable:
    """The table measured on one H100: the default for any GPU."""
    return builtin("h100")


def of_gpu(name: str, backend: str = "cudnn") -> KernelTable:
    """The built-in table of a GPU, by its driver's name: its own, else an H100's.

    It is of these kernels if there is one, else of cuDNN's (its `backend` says which). A file GPU.json or
    GPU-BACKEND.json beside the others is found by its name: h200-fa4.json.
    """
    gpus = [table for table in builtin_names() if "-" not in table]
    gpu = next((gpu for gpu in gpus if gpu.upper() in name), "h100")
    measured = [f"{other}-{backend}" for other in (gpu, *reversed(gpus))]
    return builtin(next((table for table in measured if table in builtin_names()), gpu))


def _tiled(rows: IntArray, tile: int = TILE) -> IntArray:
    return -(-rows // tile) * tile


def _place(grid: FloatArray, values: IntArray | FloatArray) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """The grid cell of each value, and how far into it, 0 to 1. Values outside the grid are clamped to its end."""
    at = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, len(grid) - 2)
    return at, np.clip((values - grid[at]) / (grid[at + 1] - grid[at]), 0.0, 1.0)


def frozen(value: Any) -> Any:
    """Converts lists to tuples at every depth; keeps the keys of JSON objects."""
    if isinstance(value, dict):
        return {name: frozen(entry) for name, entry in value.items()}
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value
