"""Activation shapes of a pipeline step, known on every stage from the plan.

Megatron's `variable_seq_lengths` exchanges the shape before each transfer and then synchronises the device.
Every stage draws the same micro-batches here, so it knows all shapes before the step: 1F1B receives forward
activations of micro-batches 0, 1, .. in order, and gradients in the same order. The queues are made anew at
every forward_backward call (train, rerun) and never carried over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Shape = tuple[int, int, int]


class ShapeQueue:
    """Shapes of one step by direction; each counter walks the micro-batches in schedule order."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = tuple(shapes)
        self._next = {"receive forward": 0, "receive backward": 0, "send forward": 0, "send backward": 0}

    def take(self, direction: str) -> Shape:
        index = self._next[direction]
        if index >= len(self._shapes):
            raise RuntimeError(
                f"pipeline transfer {index} ({direction}), but the step has {len(self._shapes)} micro-batches"
            )
        self._next[direction] = index + 1
        return self._shapes[index]

    def check(self, direction: str, tensor: Any) -> None:
        """Raise unless a tensor to be sent has the planned shape (compared on the host)."""
        expected = self.take(direction)
        if tuple(tensor.shape) != expected:
            raise RuntimeError(f"{direction}: tensor of shape {tuple(tensor.shape)}, planned {expected}")


_current: ShapeQueue | None = None


def wrap_communicate_shapes(original: Callable[..., Any]) -> Callable[..., Any]:
    """P2PCommunicator._communicate_shapes that answers from the plan during a planned step."""

    def communicate_shapes(
        self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> Any:
        if _current is None:
            return original(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        if tensor_send_next is not None:
            _current.check("send forward", tensor_send_next)
        if tensor_send_prev is not None:
            _current.check("send backward", tensor_send_prev)
        from_prev = list(_current.take("receive forward")) if recv_prev else [0, 0, 0]
        from_next = list(_current.take("receive backward")) if recv_next else [0, 0, 0]
        return from_prev, from_next

    return communicate_shapes


def wrap_get_forward_backward_func(original: Callable[..., Any]) -> Callable[..., Any]:
    """get_forward_backward_func whose function draws all micro-batches of the step before it starts."""

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _with_known_shapes(original(*args, **kwargs))

    return get_forward_backward_func


def _with_known_shapes(forward_backward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*, data_iterator: Any, num_microbatches: int, **kwargs: Any) -> Any:
        from wlb_megatron.plugin import data
        from wlb_megatron.plugin.rehearsal import rehearse

        source = data.planned_iterator(data_iterator)
        if source is None:
            return forward_backward(data_iterator=data_iterator, num_microbatches=num_microbatches, **kwargs)

        def step(batches: Sequence[Any]) -> Any:
            global _current
            _current = ShapeQueue([data.activation_shape(batch) for batch in batches])
            try:
                return forward_backward(
                    data_iterator=_drawn(batches), num_microbatches=len(batches), **kwargs
                )
            finally:
                _current = None

        training = not kwargs.get("forward_only")
        longest = source.take_rehearsal() if training else None
        if longest is not None:
            rehearse(lambda: step([longest] * num_microbatches), kwargs["model"], longest)
        batches = data.draw_step(data_iterator, num_microbatches)
        result = step(batches)
        if training:
            source.after_step(batches)
        return result

    return run


def _drawn(batches: Sequence[Any]) -> Iterator[Any]:
    yield from batches
