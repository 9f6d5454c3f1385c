"""What a document costs each rank of a group, by the group's size: what the planner adds up (nanoseconds a layer).

attention / g + the rest / g + keys exchanged, by degree and by what links the ranks (NVLink inside a node, network
outside) + what a micro-step costs whatever it holds. predicted_time (plan_step.py) shards whole micro-steps
as the executor would and is dearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.kernel_table import KernelTable

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

STEP_NS = 300_000
"""Assumed: what a layer takes, forward + backward, for a handful of tokens (launches, small kernels)."""


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """Prices of one layer, forward + backward, on the ranks of a group.

    Groups have these `sizes`, ascending. `tables` has the kernel table of each, its exchange over what links such a
    group. `token_ns` is everything of a token but attention, `step_ns` what any micro-step costs. `sharding` is how a
    group cuts its documents.
    """

    sizes: tuple[int, ...]
    tables: tuple[KernelTable, ...]
    token_ns: float
    step_ns: int = STEP_NS
    sharding: str = "adaptive"

    def prices(self, lengths: npt.ArrayLike) -> IntArray:
        """int64[sizes, n]: nanoseconds that each document (tokens) costs each rank of a group of each size."""
        shares = np.asarray(lengths, dtype=np.int64) / np.array(self.sizes)[:, None]
        return np.rint(self.attention(lengths) + self.token_ns * shares).astype(np.int64)

    def attention(self, lengths: npt.ArrayLike) -> FloatArray:
        """float64[sizes, n]: the part of `prices` that is attention and its exchange.

        A document is cut in causal pairs over all of its group; one on a group of 1 is whole.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        whole_ns = self.tables[0].diagonal_ns(tokens)
        rows = []
        for size, table in zip(self.sizes, self.tables, strict=True):
            if size == 1:
                attention = whole_ns.astype(np.float64)
            else:
                attention = table.cut_ns(whole_ns, tokens, size)
                # Diagonals run while keys travel: 2 of the 2 x g chunks, each 1 / (2g)^2 of the pairs.
                moved = table.exchange_row * tokens * (size - 1) / size
                attention += np.maximum(moved - whole_ns / (2 * size * size), 0.0)
            rows.append(attention)
        return np.array(rows)

    def opening(self) -> tuple[int, ...]:
        """Nanoseconds that a micro-step on a group of each size costs beyond step_ns: latency, one more call."""
        return tuple(
            round(table.exchange + table.earlier_call) if size > 1 else 0
            for size, table in zip(self.sizes, self.tables, strict=True)
        )


def token_ns(table: KernelTable, quadratic_at: float) -> float:
    """Nanoseconds of a layer's token without attention: a document of `quadratic_at` tokens takes as long in attention
    as in the rest. `table` is that of one tensor-parallel rank's heads."""
    probe = np.array([65536], dtype=np.int64)
    plain = replace(table, segment=0.0, query_row=0.0, key_row=0.0)
    return float(plain.diagonal_ns(probe)[0]) / 65536**2 * quadratic_at


def group_cost(
    table: KernelTable,
    token_ns: float,
    sizes: Sequence[int],
    *,
    tensor: int = 1,
    assumptions: Assumptions | None = None,
    sharding: str = "adaptive",
) -> GroupCost:
    """Costs over an assumed cluster. `table` is that of one tensor-parallel rank's heads, its exchange over NVLink.

    tensor: tensor-parallel size, which is how far apart the ranks of a group lie.
    """
    rates = assumptions or Assumptions()
    tables = tuple(rates.linked(table, size, tensor) for size in sizes)
    return GroupCost(sizes=tuple(sizes), tables=tables, token_ns=token_ns, sharding=sharding)
