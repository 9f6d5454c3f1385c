"""Growing global batches as Megatron's flags give them: --step-batch-size-schedule and --rampup-batch-size."""

from __future__ import annotations

from typing import Any

from wlb_megatron.errors import WlbError
from wlb_megatron.packing.batch_schedule import BatchSchedule, linear_ramp


def batch_schedule(args: Any) -> BatchSchedule:
    """Micro-batches of a global batch, over all ranks, by consumed samples. WlbError if the flags do not fit."""
    text = getattr(args, "step_batch_size_schedule", None)
    if text is not None:
        return BatchSchedule(_steps(text, args.seq_length))
    if getattr(args, "rampup_batch_size", None) is not None:
        start, increment, samples = (int(value) for value in args.rampup_batch_size)
        return linear_ramp(start, increment, samples, args.global_batch_size)
    return BatchSchedule.constant(args.global_batch_size)


def ramp_as_steps(args: Any) -> str | None:
    """--rampup-batch-size as a --step-batch-size-schedule (in tokens, as Megatron reads it), where Megatron has that:
    0.19.2 parses the former and ignores it. None where there is nothing to translate."""
    ignored = hasattr(args, "step_batch_size_schedule") and args.step_batch_size_schedule is None
    if not ignored or getattr(args, "rampup_batch_size", None) is None:
        return None
    return " ".join(f"{at * args.seq_length}:{size}" for at, size in batch_schedule(args).steps)


def _steps(text: str, window: int) -> tuple[tuple[int, int], ...]:
    """Megatron's own reading of the schedule: (samples, size)."""
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    try:
        calculator = StepBatchsizeNumMicroBatchesCalculator(
            micro_batch_size=1,
            data_parallel_size=1,
            decrease_batch_size_if_needed=False,
            rank=1,
            schedule=text,
            seq_length=window,
        )
    except (AssertionError, ValueError) as error:
        raise WlbError(f"--step-batch-size-schedule {text!r}: {error}") from None
    return tuple((int(at), int(size)) for at, size in calculator.schedule)
