"""Numbers that Megatron divides by, or hands on, without a look at them: too small ones are refused before it does."""

from __future__ import annotations

from typing import Any

LEAST = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "seq_length": 1,
    "log_interval": 1,
    "eval_interval": 1,
    "eval_iters": 0,
    "train_iters": 0,
    "num_workers": 0,
    "seed": 0,
}
"""By Megatron's names, the least that each may be."""


def too_small(args: Any) -> str | None:
    """What to refuse of Megatron's arguments before they are validated, a line each; None where nothing is wrong."""
    lines = [
        f"--{name.replace('_', '-')} {value}: give {least} or more."
        for name, least in LEAST.items()
        if (value := getattr(args, name, None)) is not None and value < least
    ]
    return "\n".join(lines) or None
