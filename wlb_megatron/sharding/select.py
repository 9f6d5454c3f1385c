"""Cuts a micro-batch over its context-parallel ranks by a named sharding, or by the one predicted fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy.typing as npt

from wlb_megatron.pipeline.orders import Link
from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding.chunks import Holders, around
from wlb_megatron.sharding.predict import predict_all
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.slots import PieceList
from wlb_megatron.workload.kernel_table import KernelTable, h100


def shard(lengths: npt.ArrayLike, cp_size: int, kind: str, table: KernelTable | None = None) -> ShardPlan:
    """The shard plan of one micro-batch.

    * lengths: int[n], tokens of each piece in packed order, the padding piece (if any) last. Their sum must be a
      positive multiple of cp_size; else ValueError.
    * kind: one of registry.SHARDINGS.
    * table: kernel times by which adaptive predicts (default: the H100's).
    """
    return shard_all([lengths], cp_size, kind, table)[0]


def shard_all(
    micro_batches: Sequence[npt.ArrayLike],
    cp_size: int,
    kind: str,
    table: KernelTable | None = None,
    links: Sequence[Link] = (),
) -> list[ShardPlan]:
    """Shard plans of several micro-batches in one pass, much faster than one by one. See `shard`.

    links: documents in chunks (chunks.links_of). If given, the micro-batches are all those of one data-parallel
    rank's iteration, in order, or of several, one after another.
    """
    prefixes, rests = around(micro_batches, links) if links else ([], [])
    pieces = PieceList.of(micro_batches, prefixes)
    choices = _choices(pieces, cp_size, kind, table or h100())
    if not links:
        return _fastest(choices, table or h100())
    # Only once earlier micro-batches are cut is it known which rank holds a prefix's keys.
    depths = [0] * pieces.count
    for link in sorted(links):
        depths[link.micro_batch] = max(depths[link.micro_batch], depths[link.earlier] + 1)
    holders, chosen_plans = Holders(links), choices[next(iter(choices))].copy()
    for depth in range(max(depths) + 1):
        turn = [index for index, number in enumerate(depths) if number == depth]
        shared = [holders.chunks(index, prefixes[index], rests[index], cp_size) for index in turn]
        of_turn = {
            name: [replace(plans[index], chunks=chunks) for index, chunks in zip(turn, shared, strict=True)]
            for name, plans in choices.items()
        }
        for index, plan in zip(turn, _fastest(of_turn, table or h100()), strict=True):
            chosen_plans[index] = plan
            holders.settled(index, plan)
    return chosen_plans


def _choices(pieces: PieceList, cp_size: int, kind: str, table: KernelTable) -> dict[str, list[ShardPlan]]:
    """The plans of all micro-batches under each sharding that `kind` chooses from, by what logs call them. On a tie,
    the first is taken."""
    names = SHARDINGS[kind].chooses or (kind,)
    if cp_size == 1 or not pieces.count:
        names = names[:1]  # one rank holds all pieces whole
    plans = {name: SHARDINGS[name].load()(pieces, cp_size, table) for name in names}
    return plans if len(plans) > 1 else {"": plans[names[0]]}


def _fastest(choices: dict[str, list[ShardPlan]], table: KernelTable) -> list[ShardPlan]:
    """For each micro-batch, the plan that is predicted fastest; on a tie, the first."""
    if len(choices) == 1:
        return next(iter(choices.values()))
    times = predict_all([plan for plans in choices.values() for plan in plans], table).max(axis=1)
    fastest = times.reshape(len(choices), -1).argmin(axis=0).tolist()
    names = list(choices)
    return [
        replace(choices[names[choice]][index], kind=names[choice]) for index, choice in enumerate(fastest)
    ]
