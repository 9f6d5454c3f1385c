"""Moves the keys and values that other ranks' queries see, and their gradients back to the owners.

Both ways are one all-to-all of rows, whose counts every rank knows in advance: no shape is exchanged, no
device is waited for. It is started, then waited for, so that kernels on local keys run meanwhile (NCCL works
on a stream of its own and orders itself after the current one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceExchange
from wlb_megatron.attention.kernels.row_sums import add_rows, spread_rows

on_wait: Callable[[Callable[[], Any]], None] | None = None
"""Where set: given each wait for what travels, to be called, by whoever times them."""


def start_gather(exchange: DeviceExchange, kv: Tensor, group: Any) -> Callable[[int], Tensor]:
    """Begin fetching the keys this rank needs. kv: [t, 2, heads, dim], those it holds (ShardPlan.held_keys).

    Returns a function that waits and gives [rows, 2, heads, dim] for the rows it is asked for: n in the order of the
    plan's key buffer, and others that nothing reads.
    """
    if not exchange.remote:
        return lambda rows: spread_rows(kv, exchange.send_rows, rows)
    sent = kv.index_select(0, exchange.send_rows)
    arrived, work = _all_to_all(sent, exchange.send_counts, exchange.recv_counts, group)

    def finish(rows: int) -> Tensor:
        _wait(work)
        return spread_rows(arrived, exchange.place, rows)

    return finish


def start_return(exchange: DeviceExchange, grad: Tensor, group: Any) -> Callable[..., None]:
    """Begin returning gradients to the owners of the keys. grad: [rows, 2, heads, dim], as start_gather gave them.

    Returns a function that waits and adds what came back to the gradients of the rank's own keys,
    [t, 2, heads, dim], and of each part of its cached ones: in fp32 at least, in rank order, rounded once.
    """
    back, work = grad, None
    if exchange.remote:
        back = grad.index_select(0, exchange.unplace)
        back, work = _all_to_all(back, exchange.recv_counts, exchange.send_counts, group)

    def finish(*held: Tensor) -> None:
        if work is not None:
            _wait(work)
        for target, bags in zip(held, exchange.returns, strict=True):
            add_rows(target, back, bags)

    return finish


def _wait(work: Any) -> None:
    if on_wait is None:
        work.wait()
    else:
        on_wait(work.wait)


def _all_to_all(
    sent: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Any
) -> tuple[Tensor, Any]:
    arrived = sent.new_empty((sum(recv_counts), *sent.shape[1:]))
    work = dist.all_to_all_single(
        arrived, sent, list(recv_counts), list(send_counts), group=group, async_op=True
    )
    return arrived, work
