"""FLOPs of the documents trained: Megatron counts them, told which these are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.training import get_args, training

from wlb_megatron.plugin.job_state import part


@dataclass(slots=True)
class SegmentCounts:
    """Tokens and squared lengths of documents, over all data-parallel ranks.

    passed: those of each iteration since the last line. logged: those of the iteration that was logged last.
    """

    passed: list[tuple[Any, ...]] = field(default_factory=list)
    logged: tuple[Any, ...] = (None, None)


def count_segments(lengths: Sequence[np.ndarray]) -> None:
    """Add a trained step's documents. Once a step, however often Megatron runs it again, and not for evaluation.

    lengths: of each micro-batch's documents. Padding is left out; a document in chunks is whole in the micro-batch of
    its last chunk.
    """
    # From 0 on, with one of no tokens: Megatron's ranks meet in its sum also where one has no document.
    cumulative = torch.from_numpy(np.concatenate(([0, 0], *lengths)).cumsum())
    training.update_seqlen_stats_from_cu_seqlens(cumulative.cuda(non_blocking=True))


def take_mean(arguments: dict[str, Any]) -> None:
    """Before training_log(**arguments): have it take the mean FLOPs of the iterations since the last line.

    Megatron divides the last iteration's FLOPs by the interval's mean time. That is the throughput only where all
    iterations are alike.
    """
    counts = part(SegmentCounts)
    counts.logged = tuple(arguments.get(name) for name in _TOTALS)
    if None in counts.logged:
        return
    passed = counts.passed
    passed.append(counts.logged)
    mean = (sum(column) / len(passed) for column in zip(*passed, strict=True))
    arguments |= dict(zip(_TOTALS, mean, strict=True))
    # After the first iteration Megatron logs, but goes on summing times.
    if arguments["iteration"] % get_args().log_interval == 0 and not arguments.get("is_first_iteration"):
        passed.clear()


def logged_operations() -> float | None:
    """FLOPs of the iteration logged last: the model's own of its documents, forward and backward, by Megatron's
    formula. None if they were not counted."""
    logged = part(SegmentCounts).logged
    if None in logged:
        return None
    totals = dict(zip(_TOTALS, logged, strict=True))
    return float(training.num_floating_point_operations(get_args(), 1, **totals))


_TOTALS = ("total_real_tokens_in_batch", "seqlen_squared_sum_in_batch")
"""What training_log is given of an iteration: tokens and squared lengths of documents, over all ranks."""
