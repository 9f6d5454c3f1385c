"""Growing global batches as Megatron's flags give them: --step-batch-size-schedule and --rampup-batch-size."""

from __future__ import annotations

import itertools
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.fixed.batch_schedule import BatchSchedule, linear_ramp


def windows_each(args: Any, *, evaluation: bool = False) -> int:
    """Windows (Megatron's samples) of a micro-batch in the mean: --micro-batch-size, or its like for evaluation."""
    trained = getattr(args, "micro_batch_size", None) or 1
    return int((getattr(args, "eval_micro_batch_size", None) if evaluation else None) or trained)


def joined_window(args: Any, *, evaluation: bool = False) -> int:
    """Tokens of a micro-batch in the mean."""
    return int(args.seq_length) * windows_each(args, evaluation=evaluation)


def batch_schedule(args: Any) -> BatchSchedule:
    """Windows of a global batch, over all ranks, by consumed samples. WlbError if the flags do not fit."""
    text, decreased = getattr(args, "step_batch_size_schedule", None), _decreased(args)
    if text is not None:
        if decreased:
            raise WlbError(
                "--decrease-batch-size-if-needed does not go with batches that grow by --step-batch-size-schedule, as "
                "which Megatron trains --rampup-batch-size, too: give sizes that the data-parallel size divides"
            )
        return BatchSchedule(_steps(text, args.seq_length))
    schedule = BatchSchedule.constant(args.global_batch_size)
    if getattr(args, "rampup_batch_size", None) is not None:
        start, increment, samples = (int(value) for value in args.rampup_batch_size)
        schedule = linear_ramp(start, increment, samples, args.global_batch_size)
    return schedule.rounded(args.data_parallel_size * windows_each(args)) if decreased else schedule


def evaluated(args: Any) -> int:
    """Windows of an evaluation iteration over all ranks; before 0.18 Megatron evaluates in training's batches."""
    size = int(getattr(args, "eval_global_batch_size", None) or args.global_batch_size)
    multiple = args.data_parallel_size * windows_each(args, evaluation=True)
    return size - size % multiple if _decreased(args) else size


def _decreased(args: Any) -> bool:
    """Whether sizes that data-parallel ranks do not divide are rounded down, as Megatron does."""
    return bool(getattr(args, "decrease_batch_size_if_needed", False))


def plan_decides(config: WlbConfig, *, evaluation: bool = False) -> bool:
    """Whether the plan makes as many micro-batches of a rank's windows as the interleaved schedule takes, whatever
    their number. Evaluation is packed by varlen and by fixed groups whatever trains."""
    trains = config.packing == "varlen" and config.cp_mode == "fixed"
    return config.release == "balance" and (evaluation or trains)


def misfit(size: int, args: Any, *, planned: bool = False, evaluation: bool = False) -> str | None:
    """Why Megatron cannot train a global batch of so many windows in this layout; None where it can. planned: see
    plan_decides."""
    ranks, stages = args.data_parallel_size, args.pipeline_model_parallel_size
    each = windows_each(args, evaluation=evaluation)
    if size % (ranks * each):
        of = f"the data-parallel size {ranks}" + (f" x {each} windows of a micro-batch" if each > 1 else "")
        return f"a global batch of {size} is not a multiple of {of}: change one of them"
    if (args.virtual_pipeline_model_parallel_size or 1) == 1:
        return None
    group = getattr(args, "microbatch_group_size_per_vp_stage", None) or stages
    if group < stages:
        return f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below the {stages} pipeline stages"
    count = size // (ranks * each)
    if planned:
        return None
    if _interleaves(count, group, stages):
        return None
    next_one = next(more for more in itertools.count(count) if _interleaves(more, group, stages))
    return (
        f"a global batch of {size} gives each data-parallel rank {count} micro-batches. Virtual pipeline stages take "
        f"them in groups of {group}, and the last group must have {stages} or more: {next_one * ranks * each} would do"
    )


def _interleaves(micro_batches: int, group: int, stages: int) -> bool:
    """Whether Megatron's interleaved schedule takes so many micro-batches, by groups of `group`."""
    return micro_batches >= group and not 0 < micro_batches % group < stages


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


def micro_step_multiple(args: Any) -> int:
    """The interleaved schedule takes micro-batches by groups of this many; 1F1B any number."""
    if (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) == 1:
        return 1
    group = getattr(args, "microbatch_group_size_per_vp_stage", None)
    return int(group or args.pipeline_model_parallel_size)
