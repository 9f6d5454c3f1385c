"""Sizes of batches as Megatron's flags give them, also of growing ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.planner import BatchSchedule, linear_ramp
from wlb_megatron.workload.model import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Sizes in windows, Megatron's samples.

    window: tokens, --seq-length. schedule: sizes of a global batch over all ranks, by consumed samples. evaluated: size
    of an evaluation iteration over all ranks. micro_batch_size, evaluated_micro_batch_size: the mean, in training and
    in evaluation. stepped: --step-batch-size-schedule gives the sizes. ramp_ignored: this Megatron parses
    --rampup-batch-size but does not train by it.
    """

    window: int
    schedule: BatchSchedule
    evaluated: int
    micro_batch_size: int = 1
    evaluated_micro_batch_size: int = 1
    stepped: bool = False
    ramp_ignored: bool = False

    @classmethod
    def of(cls, args: Any) -> BatchSizes:
        """args: Megatron's validated arguments. WlbError if the flags do not fit together."""
        micro_batch_size = int(getattr(args, "micro_batch_size", None) or 1)
        evaluated_micro_batch_size = int(getattr(args, "eval_micro_batch_size", None) or micro_batch_size)
        # Before 0.18 Megatron evaluates in training's batches.
        evaluated = int(getattr(args, "eval_global_batch_size", None) or args.global_batch_size)
        if _decreased(args):
            evaluated -= evaluated % (args.data_parallel_size * evaluated_micro_batch_size)
        return cls(
            window=args.seq_length,
            schedule=_schedule(args, micro_batch_size),
            evaluated=evaluated,
            micro_batch_size=micro_batch_size,
            evaluated_micro_batch_size=evaluated_micro_batch_size,
            stepped=getattr(args, "step_batch_size_schedule", None) is not None,
            ramp_ignored=_ramp_ignored(args),
        )

    @property
    def joined_window(self) -> int:
        """Tokens of a micro-batch in the mean."""
        return self.window * self.micro_batch_size

    @property
    def evaluated_window(self) -> int:
        """The same in evaluation."""
        return self.window * self.evaluated_micro_batch_size

    def ramp_as_steps(self) -> str | None:
        """A ramp that Megatron ignores as --step-batch-size-schedule (in tokens, as Megatron reads it); else None."""
        if not self.ramp_ignored:
            return None
        return " ".join(f"{samples * self.window}:{size}" for samples, size in self.schedule.steps)


def _schedule(args: Any, micro_batch_size: int) -> BatchSchedule:
    text, decreased = getattr(args, "step_batch_size_schedule", None), _decreased(args)
    if decreased and (text is not None or _ramp_ignored(args)):
        raise WlbError(
            "--decrease-batch-size-if-needed cannot be combined with batches that grow by --step-batch-size-schedule "
            "(Megatron trains --rampup-batch-size as one, too): give sizes that the data-parallel size divides"
        )
    if text is not None:
        return BatchSchedule(_steps(text, args.seq_length))
    schedule = BatchSchedule.constant(args.global_batch_size)
    if getattr(args, "rampup_batch_size", None) is not None:
        start, increment, samples = (int(value) for value in args.rampup_batch_size)
        schedule = linear_ramp(start, increment, samples, args.global_batch_size)
    return schedule.rounded(args.data_parallel_size * micro_batch_size) if decreased else schedule


def _ramp_ignored(args: Any) -> bool:
    """Whether Megatron has the other flag and takes its sizes from there alone, as 0.19.2 does."""
    has_steps = hasattr(args, "step_batch_size_schedule") and args.step_batch_size_schedule is None
    return has_steps and getattr(args, "rampup_batch_size", None) is not None


def _decreased(args: Any) -> bool:
    """Whether sizes that data-parallel ranks do not divide are rounded down, as Megatron does."""
    return bool(getattr(args, "decrease_batch_size_if_needed", False))


def plan_decides(config: WlbConfig, *, evaluation: bool = False) -> bool:
    """Whether the plan makes as many micro-batches of a rank's windows as the interleaved schedule takes, whatever
    their number. Evaluation is packed by varlen and by fixed groups whatever trains."""
    trains = not config.fixed_windows and config.cp_mode == "fixed"
    return config.release == "balance" and (evaluation or trains)


def misfit(size: int, sizes: Layout, micro_batch_size: int = 1, *, by_plan: bool = False) -> str | None:
    """Why Megatron cannot train a global batch of `size` windows in this layout; None if it can.

    micro_batch_size: windows. by_plan: see plan_decides.
    """
    ranks, stages = sizes.data, sizes.pipeline
    if size % (ranks * micro_batch_size):
        of = f"the data-parallel size {ranks}" + (
            f" x {micro_batch_size} windows of a micro-batch" if micro_batch_size > 1 else ""
        )
        return f"a global batch of {size} is not a multiple of {of}: change one of them"
    if sizes.virtual == 1:
        return None
    group = sizes.micro_step_multiple
    if group < stages:
        return f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below the {stages} pipeline stages"
    count = size // (ranks * micro_batch_size)
    if by_plan or _interleaves(count, group, stages):
        return None
    next_one = next(number for number in itertools.count(count) if _interleaves(number, group, stages))
    return (
        f"a global batch of {size} gives each data-parallel rank {count} micro-batches. Virtual pipeline stages take "
        f"them in groups of {group}, and the last group must have {stages} or more: "
        f"{next_one * ranks * micro_batch_size} would do"
    )


def _interleaves(micro_batches: int, group: int, stages: int) -> bool:
    """Whether Megatron's interleaved schedule takes so many micro-batches, by groups of `group`."""
    return micro_batches >= group and not 0 < micro_batches % group < stages


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
    return tuple((int(samples), int(size)) for samples, size in calculator.schedule)
