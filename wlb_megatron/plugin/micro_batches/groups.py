"""Process groups of the blocks of a pipeline stage's ranks, made once, in the same order on every rank.

A rank is in one block of each size, so it holds at most MOST_GROUPS of them, two of which are Megatron's own: its
context-parallel group and that of all data x context parallel ranks. Blocks are nested and made from
the smallest to the largest: a rank never waits in a block's creation for one that waits in a smaller one. Each is
used once before training: no communicator is set up in the midst of a step, and none takes GPU memory after the
rehearsal, which has shown that the longest micro-batches fit beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wlb_megatron.dynamic.plan import block_sizes
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.micro_batches.planning import RankGroup


@dataclass(slots=True)
class RankGroups:
    """by_size: this rank's process groups."""

    by_size: dict[int, Any] = field(default_factory=dict)


def process_group(group: RankGroup | None) -> Any:
    """The process group of a planned micro-batch; None for Megatron's own, and for a rank alone."""
    return None if group is None or group.size == 1 else part(RankGroups).by_size[group.size]


def make_groups(timeout: timedelta) -> None:
    """Make this rank's groups of all sizes. Called on every rank, before training. Safe to call again.

    timeout: their collectives' time limit, the same as that of Megatron's own groups (--distributed-timeout-minutes).
    """
    from megatron.core import parallel_state

    stage = parallel_state.get_data_parallel_group(with_context_parallel=True)
    context = parallel_state.get_context_parallel_group()
    ranks = dist.get_process_group_ranks(stage)
    here, width = ranks.index(dist.get_rank()), dist.get_world_size(context)
    block, groups = here // width * width, part(RankGroups).by_size
    if dist.get_process_group_ranks(context) != ranks[block : block + width]:
        raise RuntimeError(
            f"wlb_megatron: context-parallel ranks {dist.get_process_group_ranks(context)} do not lie side by side "
            f"among the data x context parallel ranks {ranks}: dynamic groups need Megatron's default --order"
        )
    for size in block_sizes(width, len(ranks) // width)[1:]:
        if size in groups:
            continue
        start = here // size * size
        if size == width:
            group = context
        elif size == len(ranks):
            group = stage
        else:
            members = ranks[start : start + size]
            # Megatron's own way: the group is among those whose time limit it lowers once training runs.
            group = parallel_state.create_group(members, timeout=timeout, use_local_synchronization=True)
        dist.all_reduce(torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu"), group=group)
        groups[size] = group
