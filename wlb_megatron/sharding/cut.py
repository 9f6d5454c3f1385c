"""Pads planned micro-batches and cuts them over context-parallel ranks, for training and for every command."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.orders import Link, groups, joined_groups, links_of
from wlb_megatron.plan import PADDING, IterationPlan, Piece
from wlb_megatron.registry import SHARDINGS, builds_by_size
from wlb_megatron.sharding.alignment import padding
from wlb_megatron.sharding.predict import in_one_call, in_two_calls
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard_all
from wlb_megatron.workload.kernel_table import KernelTable


def cut(
    lengths: Sequence[npt.NDArray[np.int64]],
    cp_size: int,
    sharding: str,
    table: KernelTable,
    links: Sequence[Link] = (),
) -> list[ShardPlan]:
    """Shard plans of micro-batches.

    lengths: int64[n] each, tokens of a micro-batch's pieces. If the sharding is one that chooses by the table, the
    table also chooses between one kernel call and two. The fixed shardings keep two, as in the paper. links: see
    select.shard_all.
    """
    shards = shard_all(lengths, cp_size, sharding, table, links)
    return in_fewest_calls(shards, table) if SHARDINGS[sharding].chooses else shards


def pad(pieces: tuple[Piece, ...], alignment: int) -> tuple[Piece, ...]:
    """The pieces, with a padding piece appended if their tokens are not a multiple of `alignment`."""
    missing = padding(sum(piece.end - piece.start for piece in pieces), alignment)
    return (*pieces, Piece(0, PADDING, 0, missing)) if missing else pieces


def cut_plans(
    plans: Sequence[IterationPlan], cp_size: int, alignment: int, sharding: str, table: KernelTable
) -> list[list[list[ShardPlan]]]:
    """Shard plans [iteration][micro-batch][data-parallel rank], as each rank cuts its own in training."""
    columns = [
        [pad(micro_batch.pieces, alignment) for micro_batch in column]
        for plan in plans
        for column in zip(*plan.micro_batches, strict=True)
    ]
    # All in one pass, which is much faster than rank by rank.
    firsts = np.cumsum([0, *map(len, columns)]).tolist()
    links = [
        Link(link.micro_batch + first, link.piece, link.earlier + first, link.earlier_piece)
        for column, first in zip(columns, firsts, strict=False)
        for link in links_of(column)
    ]
    lengths = [_tokens(pieces) for column in columns for pieces in column]
    together = cut(lengths, cp_size, sharding, table, links)
    ranks = iter(
        [_counted_from(first, plan) for plan in together[first:end]] for first, end in pairwise(firsts)
    )
    return [
        [list(row) for row in zip(*[next(ranks) for _ in plan.micro_batches[0]], strict=True)]
        for plan in plans
    ]


def _counted_from(first: int, plan: ShardPlan) -> ShardPlan:
    """The plan, with micro-batches counted from this one on."""
    chunks = plan.chunks
    if chunks is None or not first:
        return plan
    cached = tuple(rows - np.array([0, 0, 0, first, 0, 0]) for rows in chunks.cached)
    return replace(plan, chunks=replace(chunks, micro_batch=chunks.micro_batch - first, cached=cached))


def orders_of(plans: Sequence[IterationPlan], *, in_step: bool = False) -> list[list[tuple[int, ...] | None]]:
    """Group sizes [iteration][data-parallel rank], or None if no document is in chunks.

    in_step: all ranks run the same order (packing.limits.Trainer).
    """
    orders: list[list[tuple[int, ...] | None]] = []
    for plan in plans:
        sizes = [
            groups([column_sizes.pieces for column_sizes in column])
            for column in zip(*plan.micro_batches, strict=True)
        ]
        if in_step:
            sizes = [joined_groups(sizes)] * len(sizes)
        orders.append([column_sizes if max(column_sizes) > 1 else None for column_sizes in sizes])
    return orders


def _tokens(pieces: Sequence[Piece]) -> npt.NDArray[np.int64]:
    return np.array([piece.end - piece.start for piece in pieces], dtype=np.int64)


def digest_of_cuts(shards: Iterable[ShardPlan]) -> bytes:
    """An 8-byte hash of every segment of every rank, the cached keys, and the number of kernel calls."""
    digest = hashlib.blake2b(digest_size=8)
    for shard in shards:
        arrays = [shard.lengths, shard.prefixes, *shard.ranks]
        if shard.chunks is not None:
            arrays += [shard.chunks.rests, *shard.chunks.cached]
        sizes = [int(shard.one_call), len(shard.ranks), *map(len, arrays)]
        for array in (np.array(sizes), *arrays):
            digest.update(np.ascontiguousarray(array, dtype=np.int64))
    return digest.digest()


MOST_ROWS, MOST_KEYS = 8192, 32768
"""Limits of one call on a rank, in rows and keys, for cuDNN's kernels only. Above them one call was not faster for
hybrid plans, and the limits avoid building graphs of such sizes."""


def in_fewest_calls(plans: Sequence[ShardPlan], table: KernelTable) -> list[ShardPlan]:
    """The plans (all of one CP size), with `one_call` set where it is predicted faster. The same on all ranks.

    Two calls (attention_calls.py) use the faster kernels: causal squares, and rectangles without a mask. The first runs
    while keys travel. One bottom-right call waits for its keys, and in backward also computes what its mask hides. But
    it needs half the launches, and gathers no queries and merges no outputs.

    So with cuDNN's kernels, one call is for short pieces cut over ranks. Of 26 mixes that hybrid cuts over 8 ranks it
    is faster for 11 at a window of 8K, 9 at 16K, 1 at 32K and none above (predicted from the H100's table;
    docs/results/simulated/one_call.csv). FlashAttention-4 skips masked keys in backward, too.
    """
    small = [index for index, plan in enumerate(plans) if _fits(plan, table)]
    fewest = list(plans)
    if small:
        small_plans = [plans[index] for index in small]
        two_calls, one_call = (
            predict(small_plans, table).max(axis=1) for predict in (in_two_calls, in_one_call)
        )
        for index in np.flatnonzero(one_call < two_calls).tolist():
            fewest[small[index]] = replace(small_plans[index], one_call=True)
    return fewest


def _fits(plan: ShardPlan, table: KernelTable) -> bool:
    """Whether any rank attends to earlier keys and, if kernels are built by size, no rank exceeds the limits above."""
    fits = not builds_by_size(table.backend) or (
        max(plan.tokens_per_rank) <= MOST_ROWS
        and max(int(rows[:, 2].sum()) for rows in plan.ranks) <= MOST_KEYS
    )
    return fits and any(bool((rows[:, 1] > 0).any()) for rows in plan.ranks)
