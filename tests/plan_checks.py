"""What every plan must keep: shard plans hold each token once, groups each document once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wlb_megatron.dynamic.plan import Stage, StepPlan
from wlb_megatron.sharding.segments import IntArray, ShardPlan


def merge_touching(rows: IntArray) -> IntArray:
    """Rows in the given order; a row that continues or precedes an earlier row of its piece is merged into it.

    Example: [(0, 0, 2), (1, 0, 1), (0, 2, 4)] becomes [(0, 0, 4), (1, 0, 1)]. Empty rows are dropped.
    """
    rows = rows[rows[:, 1] < rows[:, 2]]
    if len(rows) < 2:
        return rows
    # Sorted by (piece, start), a row opens a group unless it begins where the row before it ends;
    # the group takes the place of its earliest row.
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    ordered = rows[order]
    opens = np.ones(len(rows), dtype=bool)
    opens[1:] = (ordered[1:, 0] != ordered[:-1, 0]) | (ordered[1:, 1] != ordered[:-1, 2])
    heads = np.flatnonzero(opens)
    tails = np.append(heads[1:], len(rows)) - 1
    merged_rows = np.column_stack((ordered[heads, 0], ordered[heads, 1], ordered[tails, 2]))
    return merged_rows[np.argsort(np.minimum.reduceat(order, heads))]


def validate(plan: ShardPlan) -> None:
    """Raises ValueError unless every token of every piece is on exactly one rank, once, and no rows touch.

    The same is required of the keys of prefixes.
    """
    pieces = len(plan.lengths)
    last = plan.prefixes + plan.lengths
    for rank, rows in enumerate(plan.ranks):
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise ValueError(
                f"rank {rank}: segments must be rows (piece, start, end), got shape {rows.shape}"
            )
        if not ((rows[:, 0] >= 0) & (rows[:, 0] < pieces)).all():
            raise ValueError(f"rank {rank}: a segment names a piece outside 0..{pieces - 1}")
        first = plan.prefixes[rows[:, 0]]
        inside = (rows[:, 1] >= first) & (rows[:, 1] < rows[:, 2]) & (rows[:, 2] <= last[rows[:, 0]])
        if not inside.all():
            piece, start, end = rows[np.argmin(inside)]
            raise ValueError(f"rank {rank}: segment [{start}, {end}) is empty or outside piece {piece}")
        if len(merge_touching(rows)) != len(rows):
            raise ValueError(f"rank {rank}: segments of one piece touch; merge them with merge_touching")
    _tiles(np.concatenate(plan.ranks), plan.piece_starts, plan.prefixes, "packed token")
    if plan.chunks is None:
        return
    cached = np.concatenate(plan.chunks.cached)
    if not ((cached[:, 0] >= 0) & (cached[:, 0] < pieces) & (cached[:, 1] < cached[:, 2])).all():
        raise ValueError(f"a row of cached keys is empty, or of a piece outside 0..{pieces - 1}")
    if not (cached[:, 3] < plan.chunks.micro_batch).all():
        raise ValueError(
            f"micro-batch {plan.chunks.micro_batch} is to take keys of one that is not before it"
        )
    starts = np.concatenate(([0], np.cumsum(plan.prefixes)))
    _tiles(cached, starts, np.zeros_like(plan.prefixes), "prefix token")


def _tiles(rows: IntArray, starts: IntArray, first: IntArray, what: str) -> None:
    """Raise ValueError unless rows (piece, start, end, ..) cover each piece, from its position `first` on, once.

    starts: int64[n + 1], where each piece starts if all are laid end to end.
    """
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    # In order, rows must lay all pieces end to end: each begins where the one before ends.
    begins = (starts[:-1] - first)[rows[:, 0]] + rows[:, 1]
    expected = np.concatenate(([0], np.cumsum(rows[:, 2] - rows[:, 1])))
    if (begins != expected[:-1]).any():
        index = int(np.argmax(begins != expected[:-1]))
        how = "twice" if begins[index] < expected[index] else "not at all"
        token = min(int(begins[index]), int(expected[index]))
        raise ValueError(f"{what} {token} is held {how}; each must be on one rank, once")
    if expected[-1] != starts[-1]:
        raise ValueError(f"{what} {int(expected[-1])} is held not at all; each must be on one rank, once")


def validate_groups(plan: StepPlan, lengths: npt.ArrayLike, stage: Stage) -> None:
    """Raise ValueError unless every document is in one group, groups are blocks of the stage that do not overlap
    in a micro-step, and none holds more tokens than fit it."""
    tokens = np.asarray(lengths, dtype=np.int64)
    if plan.ranks != stage.ranks:
        raise ValueError(f"a plan for {plan.ranks} ranks on a stage of {stage.ranks}")
    placed = [d for groups in plan.micro_steps for group in groups for d in group.documents]
    if sorted(placed) != list(range(len(tokens))):
        raise ValueError(f"{len(placed)} documents are placed, not each of {len(tokens)} once")
    limit = dict(zip(stage.sizes, stage.tokens, strict=True))
    for number, groups in enumerate(plan.micro_steps):
        end = 0
        for group in groups:
            if group.size not in limit or group.start % group.size or group.start + group.size > plan.ranks:
                raise ValueError(
                    f"micro-step {number}: ranks {group.start} + {group.size} are no block of the stage"
                )
            if group.start < end:
                raise ValueError(f"micro-step {number}: rank {group.start} is in two groups")
            end = group.start + group.size
            group_tokens = int(tokens[list(group.documents)].sum())
            if group_tokens > limit[group.size]:
                raise ValueError(
                    f"micro-step {number}: {group_tokens} tokens on {group.size} ranks, which hold {limit[group.size]}"
                )
