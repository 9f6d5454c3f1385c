"""Losses that Megatron's log shows besides the model's: routers' and multi-token prediction's.

They add up over a step's micro-batches until Megatron logs them times 1 / get_num_microbatches(), as means over ranks.
Two things are mended here, for the log alone; gradients are right either way.

* The plan may make another number of micro-batches. With 4 windows a step and 16 micro-batches the log would show four
  times too much.
* Multi-token prediction's losses and z-losses are means over the tokens that a rank holds of a micro-batch, losses by
  document (seq_aux_loss) over a micro-batch's. Ranks and micro-batches hold unequally many, so a mean of these means
  depends on the layout. Weighed by its tokens over the mean number of tokens, each mean counts as it should: of 2
  tokens with mean 9 and 6 with mean 5 (4 in the mean), (9 * 2/4 + 5 * 6/4) / 2 is 6, the mean over all 8.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.plugin.micro_batches.planning import PlannedMicroBatch


@dataclass(slots=True)
class LoggedLosses:
    """factor: Megatron's number of micro-batches over the plan's, in the step just trained. step: the first micro-batch
    of the step that runs, None before any. weight: the weight of the mean over tokens that a router is making, None
    outside one. averages: ranks that it is a mean of, if Megatron may leave them out. predicted: this rank's first
    predictions of the micro-batch whose further ones are scored.
    """

    factor: float = 1.0
    step: PlannedMicroBatch | None = None
    weight: Any = None
    averages: Any = None
    predicted: float = 0.0


def wrap_report(original: Original, *args: Any, **kwargs: Any) -> Any:
    """A function that logs losses times its `loss_scale`, given 1 / (planned micro-batches): means over these."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["loss_scale"] *= part(LoggedLosses).factor
    return original(*bound.args, **bound.kwargs)


def _weight(tokens: Any, step: PlannedMicroBatch, step_tokens: int, ranks: int) -> Any:
    """Of a mean over `tokens`, where `ranks` ranks together have `step_tokens` of these in the step."""
    return tokens * (step.steps * ranks / max(step_tokens, 1))


@contextmanager
def weighed(tokens: Any, ranks: int, averages: Any = None) -> Iterator[None]:
    """A router logs a mean over `tokens` in here, which is then averaged over so many ranks. averages: these ranks, to
    be given to Megatron."""
    state = part(LoggedLosses)
    if state.step is not None:
        state.weight = _weight(tokens, state.step, state.step.summary.tokens, ranks)
        state.averages = averages
    try:
        yield
    finally:
        state.weight = state.averages = None


def _averaging() -> Any:
    """The ranks of this stage that hold tokens of a step."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def wrap_apply_z_loss(original: Original, self: Any, logits: Any, padding_mask: Any = None) -> Any:
    """TopKRouter.apply_z_loss, which notes the weight of its mean."""
    tokens, ranks = logits.shape[0] if padding_mask is None else (~padding_mask).sum(), _averaging()
    with weighed(tokens, ranks.size(), ranks):
        return original(self, logits, padding_mask=padding_mask)


def wrap_record(original: Original, *args: Any, **kwargs: Any) -> Any:
    """MoEMetricsTracker.record: means over tokens weighed, z-losses averaged over all ranks, which releases before 0.19
    leave out."""
    state = part(LoggedLosses)
    if state.weight is None:
        return original(*args, **kwargs)
    *name, value, layer, layers = args
    averages = {} if state.averages is None else {"avg_group": state.averages}
    return original(*name, value * state.weight, layer, layers, **kwargs | averages)


def _missing_ranks(name: str, entry: Any) -> dict[str, Any]:
    """Which ranks a loss is to be reduced over, if a stage without experts has none to record it.

    Megatron sums over pipeline stages, then over the groups that the stage's routers recorded. So a last stage without
    experts logs one context-parallel rank's part. entry: Megatron's of the loss, with the groups noted so far.
    """
    from megatron.core import parallel_state

    if entry.reduce_group is not None or entry.avg_group is not None:
        return {}
    if name == "z_loss":
        return {"avg_group": _averaging()}
    if name == "global_load_balancing_loss":
        return {"reduce_group": _averaging()}
    if name in ("load_balancing_loss", "seq_load_balancing_loss"):
        return {"reduce_group": parallel_state.get_tensor_and_context_parallel_group()}
    return {}


def wrap_ensure_initialized(
    original: Original, self: Any, name: str, *positional: Any, **keywords: Any
) -> None:
    """MoEMetricsTracker.ensure_initialized, with the ranks of a loss that this stage does not record."""
    original(self, name, *positional, **keywords)
    entry = self.metrics[name]
    for group, ranks in _missing_ranks(name, entry).items():
        setattr(entry, group, ranks)
        entry.needs_dp_avg = name != "global_load_balancing_loss"


def wrap_save(
    original: Original, loss: Any, *positional: Any, avg_group: Any = None, **keywords: Any
) -> None:
    """MTPLossLoggingHelper's save_metrics_to_tracker or save_loss_to_tracker, given losses that are weighed."""
    state = part(LoggedLosses)
    if state.step is not None and state.step.predictions and avg_group is not None:
        weight = _weight(state.predicted, state.step, state.step.predictions[0], avg_group.size())
        loss = loss * weight if weight else loss.new_zeros(())
    original(loss, *positional, avg_group=avg_group, **keywords)
