"""FLOPs of the segments trained: Megatron's own count from 0.18 on, the same numbers for releases that lack it.

Before 0.18 Megatron counts whole windows, batch * (L * s + A * s * s) with s = --seq-length. L and A are read off its
own formula at s and 2 * s; a step of documents l then counts L * sum(l) + A * sum(l * l), over data-parallel ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.training import training

_here: list[int] | None = None
"""Tokens and squared lengths of this rank's micro-batches since the last step's count; None outside of a step."""
_counted: tuple[float, float] | None = None


def count_segments(bounds: Sequence[torch.Tensor]) -> None:
    """Add a trained step's documents; bounds: of each micro-batch, int64[n + 1] on the CPU, cumulative lengths, padding
    left out; a document in chunks is whole in that of its last. Once a step, however often Megatron runs it again, and
    not for evaluation."""
    lengths = torch.cat([each.diff() for each in bounds])
    if hasattr(training, "update_seqlen_stats_from_cu_seqlens"):
        whole = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        training.update_seqlen_stats_from_cu_seqlens(whole.cuda(non_blocking=True))
        return
    global _here
    tokens, squares = _here or (0, 0)
    _here = [tokens + int(lengths.sum()), squares + int((lengths * lengths).sum())]


def wrap_num_floating_point_operations(original: Callable[..., Any]) -> Callable[..., Any]:
    """num_floating_point_operations(args, batch_size) of the step just trained, on every rank once before the log."""

    def num_floating_point_operations(args: Any, batch_size: int) -> float:
        global _counted, _here
        if _here is not None:  # the training loop's call after a step; the log's then finds the same numbers
            _counted, _here = _over_all_ranks(_here), None
        if _counted is None:
            return float(original(args, batch_size))
        one, two = copy.copy(args), copy.copy(args)
        two.seq_length = 2 * args.seq_length
        per_window, per_double = float(original(one, 1)), float(original(two, 1))
        attention = (per_double - 2 * per_window) / (2 * args.seq_length**2)
        linear = per_window / args.seq_length - attention * args.seq_length
        return linear * _counted[0] + attention * _counted[1]

    return num_floating_point_operations


def _over_all_ranks(here: list[int]) -> tuple[float, float]:
    """The sums, where tensor-, context- and pipeline-parallel ranks told the same."""
    from megatron.core import parallel_state

    sums = torch.tensor(here, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(sums)
    alike = torch.distributed.get_world_size() // parallel_state.get_data_parallel_world_size()
    tokens, squares = (sums / alike).tolist()
    return tokens, squares
