"""Activation shapes of a pipeline step, known on every stage from the plan.

Megatron's `variable_seq_lengths` exchanges the shape before each transfer and then synchronises the device.
Every stage draws the same micro-batches here, so it knows all shapes before the step. Transfers of one direction
between two stages arrive in the order in which they are sent, whatever overlaps with what; so a stage's queue to
receive is its neighbour's queue to send. The queues are made anew at every forward_backward call (train, evaluation,
rerun) and never carried over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from megatron.core import parallel_state

from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.plugin.micro_batches.iterators import draw_step, planned_iterator
from wlb_megatron.plugin.micro_batches.loaded import LoadedMicroBatch
from wlb_megatron.plugin.step import grouped_steps
from wlb_megatron.plugin.step.losses import check_together, deferring, divided_losses, returns_its_losses
from wlb_megatron.refusals import RefusedHere

Shape = tuple[int, int, int]


def transfer_orders(
    table: Sequence[tuple[int, int]], turns: Sequence[int], stage: int, stages: int
) -> dict[str, list[int]]:
    """The micro-batch of each transfer of a step, by direction, on one pipeline stage (1F1B or interleaved).

    table: (micro-batch, model chunk) of each forward, as Megatron's get_schedule_table has them. turns: the micro-batch
    of a model chunk's n-th backward. The last stage hands activations of all but its last chunk on to the first stage.
    2 stages of 2 chunks, blocks of 2, 3 micro-batches: every stage's forwards are of micro-batches 0 1 | 0 1 | 2 | 2,
    by turns of chunk 0 and 1; the last stage sends 0 1 2, after its chunk 0, the first sends all. Backwards go the same
    way, through the chunks in reverse order.
    """
    last_chunk = table[-1][1]
    through = [index for index, _ in table]
    wrapped = [index for index, chunk in table if chunk < last_chunk]
    back, back_wrapped = ([turns[index] for index in order] for order in (through, wrapped))
    is_first, is_last = stage == 0, stage == stages - 1
    return {
        "send forward": wrapped if is_last else through,
        "receive forward": wrapped if is_first else through,
        "send backward": back_wrapped if is_first else back,
        "receive backward": back_wrapped if is_last else back,
    }


class ShapeQueue:
    """Shapes of one step by direction, in the schedule's order."""

    def __init__(self, shapes: Sequence[Shape], orders: dict[str, list[int]]) -> None:
        self._shapes = {way: deque(shapes[index] for index in order) for way, order in orders.items()}

    def take(self, direction: str) -> Shape:
        if not self._shapes[direction]:
            raise RuntimeError(f"{direction}: one more pipeline transfer than the step has")
        return self._shapes[direction].popleft()

    def check(self, direction: str, tensor: Any) -> None:
        """Raise unless a tensor to be sent has the planned shape (compared on the host)."""
        expected = self.take(direction)
        if tuple(tensor.shape) != expected:
            raise RuntimeError(f"{direction}: tensor of shape {tuple(tensor.shape)}, planned {expected}")


def wrap_communicate_shapes(
    original: Original,
    self: Any,
    tensor_send_next: Any,
    tensor_send_prev: Any,
    recv_prev: bool,
    recv_next: bool,
) -> Any:
    """P2PCommunicator._communicate_shapes that answers from the plan during a planned step."""
    shapes: ShapeQueue | None = part(grouped_steps.Running).shapes
    if shapes is None:
        return original(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
    if tensor_send_next is not None:
        shapes.check("send forward", tensor_send_next)
    if tensor_send_prev is not None:
        shapes.check("send backward", tensor_send_prev)
    from_prev = list(shapes.take("receive forward")) if recv_prev else [0, 0, 0]
    from_next = list(shapes.take("receive backward")) if recv_next else [0, 0, 0]
    return from_prev, from_next


def wrap_get_forward_backward_func(original: Original, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """get_forward_backward_func whose function draws all micro-batches of the step before it starts."""
    forward_backward = original(*args, **kwargs)

    def run(*, data_iterator: Any, num_microbatches: int, **kwargs: Any) -> Any:
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.utils import get_model_config

        from wlb_megatron.plugin.logs import timers, trace
        from wlb_megatron.plugin.logs.logged_losses import LoggedLosses
        from wlb_megatron.plugin.step import recomputation
        from wlb_megatron.plugin.step.rehearsal import REHEARSAL, rehearse, same_again
        from wlb_megatron.plugin.take_over import Start

        # Model chunks of a stage have an iterator each, all the plugin's same one.
        first = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        source, training = planned_iterator(first), not kwargs.get("forward_only")
        if source is None:
            if training and part(Start).job is not None:
                raise RefusedHere(
                    "wlb_megatron: the data of this training step are not the plugin's, so the script has called a "
                    "pretrain() that it held before enable(): call enable() before anything imports megatron.training"
                )
            return forward_backward(data_iterator=data_iterator, num_microbatches=num_microbatches, **kwargs)
        model, logged = kwargs["model"], part(LoggedLosses)
        models = model if isinstance(model, list) else [model]
        config, chunks = get_model_config(models[0]), len(models)
        block = config.microbatch_group_size_per_vp_stage if chunks > 1 else 1

        def step(batches: Sequence[LoadedMicroBatch]) -> Any:
            groups = batches[0].planned.chunk_groups if training else ()
            draw_next = draw_ahead if training and batches[0].planned.iteration != REHEARSAL else None
            check_together(len(batches))
            tokens = source.equal_tokens * num_microbatches
            if training:
                logged.step = batches[0].planned
                if config.fp16 and not tokens:
                    tokens = max(1, batches[0].planned.predictions[0])
            divided = divided_losses(config, tokens)
            running = grouped_steps.running(groups, chunks)
            is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            deferred = deferring(
                bool(groups) and source.defers_losses and returns_its_losses(models[-1]),
                config,
                len(batches) if is_last else 0,
            )
            iterators = [_drawn(batches, draw_next), *(_drawn(batches) for _ in range(chunks - 1))]
            plans = [batch.planned for batch in batches]
            recomputing = recomputation.planned(plans, models) if training else nullcontext()
            with running, recomputing, divided, deferred:  # what is counted is then divided
                state = part(grouped_steps.Running)
                orders = transfer_orders(
                    schedules.get_schedule_table(len(batches), chunks, block),
                    range(len(batches)) if state.step is None else state.step.order,
                    parallel_state.get_pipeline_model_parallel_rank(),
                    parallel_state.get_pipeline_model_parallel_world_size(),
                )
                state.shapes = ShapeQueue([batch.activation_shape for batch in batches], orders)
                if training and chunks == 1:
                    grouped_steps.prepare_offloading(len(batches))
                return forward_backward(
                    data_iterator=iterators if chunks > 1 else iterators[0],
                    num_microbatches=len(batches),
                    **kwargs,
                )

        def draw_ahead(count: int) -> None:
            start = time.perf_counter()
            source.draw_ahead(count)
            timers.add("wlb-draw", time.perf_counter() - start)

        if training and source.rehearsal is not None:
            rehearsal, source.rehearsal = source.rehearsal, None
            repeated = rehearsal.batches
            if len(repeated) == 1:
                repeated = same_again(repeated[0], -(-num_microbatches // block) * block)
            rehearse(lambda: step(repeated), models, rehearsal)
        source.began = time.perf_counter()
        batches = draw_step(first)
        if training:
            timers.add("wlb-draw", time.perf_counter() - source.began)
            trace.begin_step()
        result = step(batches)
        if training:
            logged.factor = num_microbatches / len(batches)
            source.after_step(batches, False)
        return result

    return run


def _drawn(
    batches: Sequence[LoadedMicroBatch], draw_next: Callable[[int], None] | None = None
) -> Iterator[LoadedMicroBatch]:
    """The step's micro-batches. From the second on, when the device has the one before to work at, draw_next gets how
    many of the next step's are due by then."""
    for index, batch in enumerate(batches):
        if draw_next is not None and index:
            draw_next(index + 1)
        yield batch
