"""FLOPs of the segments trained: Megatron's own count from 0.18 on, the same numbers for releases that lack it.

Before 0.18 Megatron counts whole windows, batch * (L * s + A * s * s) with s = --seq-length. L and A are read off its
own formula at s and 2 * s; a step of documents l then counts L * sum(l) + A * sum(l * l), over data-parallel ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.training import get_args, training

from wlb_megatron.plugin.job_state import Original, part


@dataclass(slots=True)
class SegmentCounts:
    """Tokens and squared lengths of documents.

    here: sums over this rank's micro-batches since the last step's count, None outside a step. step: the last step's,
    over all data-parallel ranks. passed: those of each iteration since the last line. logged: those of the iteration
    that was logged last.
    """

    here: list[int] | None = None
    step: tuple[float, float] | None = None
    passed: list[tuple[Any, ...]] = field(default_factory=list)
    logged: tuple[Any, ...] | None = None


def count_segments(bounds: Sequence[torch.Tensor]) -> None:
    """Add a trained step's documents. Once a step, however often Megatron runs it again, and not for evaluation.

    bounds: each micro-batch's cumulative lengths, int64[n + 1] on the CPU. Padding is left out; a document in chunks is
    whole in the micro-batch of its last chunk.
    """
    lengths = torch.cat([of_micro_batch.diff() for of_micro_batch in bounds])
    if hasattr(training, "update_seqlen_stats_from_cu_seqlens"):
        cumulative = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        training.update_seqlen_stats_from_cu_seqlens(cumulative.cuda(non_blocking=True))
        return
    counts = part(SegmentCounts)
    tokens, squares = counts.here or (0, 0)
    counts.here = [tokens + int(lengths.sum()), squares + int((lengths * lengths).sum())]


def wrap_num_floating_point_operations(original: Original, args: Any, batch_size: int) -> float:
    """num_floating_point_operations(args, batch_size) of the step just trained, on every rank once before the log."""
    counts = part(SegmentCounts)
    if (
        counts.here is not None
    ):  # the training loop's call after a step; the log's then finds the same numbers
        counts.step, counts.here = _over_all_ranks(counts.here), None
    if counts.step is None:
        return float(original(args, batch_size))
    single, double = copy.copy(args), copy.copy(args)
    double.seq_length = 2 * args.seq_length
    per_window, per_double = float(original(single, 1)), float(original(double, 1))
    attention = (per_double - 2 * per_window) / (2 * args.seq_length**2)
    linear = per_window / args.seq_length - attention * args.seq_length
    return linear * counts.step[0] + attention * counts.step[1]


def take_mean(arguments: dict[str, Any]) -> None:
    """Before training_log(**arguments): have it take the mean FLOPs of the iterations since the last line.

    Megatron divides the last iteration's FLOPs by the interval's mean time. That is the throughput only where all
    iterations are alike.
    """
    counts = part(SegmentCounts)
    ours = set(_TOTALS) <= arguments.keys()
    last = tuple(arguments[name] for name in _TOTALS) if ours else counts.step
    counts.logged = last
    if last is None or None in last:
        return
    counts.passed.append(last)
    passed = counts.passed
    mean = tuple(sum(column) / len(passed) for column in zip(*passed, strict=True))
    if ours:
        arguments |= dict(zip(_TOTALS, mean, strict=True))
    else:
        counts.step = mean[0], mean[1]
    # After the first iteration Megatron logs, but goes on summing times.
    if arguments["iteration"] % get_args().log_interval == 0 and not arguments.get("is_first_iteration"):
        passed.clear()


def logged_operations() -> float | None:
    """FLOPs of the iteration logged last: the model's own of its documents, forward and backward, by Megatron's
    formula. None if they were not counted."""
    counts = part(SegmentCounts)
    if counts.logged is None or None in counts.logged:
        return None
    if hasattr(training, "update_seqlen_stats_from_cu_seqlens"):
        totals = dict(zip(_TOTALS, counts.logged, strict=True))
        return float(training.num_floating_point_operations(get_args(), 1, **totals))
    counts.step = counts.logged  # the log's own was a mean
    return float(training.num_floating_point_operations(get_args(), 1))


_TOTALS = ("total_real_tokens_in_batch", "seqlen_squared_sum_in_batch")
"""What training_log is given of an iteration from 0.18 on: tokens and squared lengths of documents, over all ranks."""


def _over_all_ranks(here: list[int]) -> tuple[float, float]:
    """The sums, where tensor-, context- and pipeline-parallel ranks counted the same."""
    from megatron.core import parallel_state

    sums = torch.tensor(here, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(sums)
    alike = torch.distributed.get_world_size() // parallel_state.get_data_parallel_world_size()
    tokens, squares = (sums / alike).tolist()
    return tokens, squares
