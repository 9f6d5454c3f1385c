"""Sends keys and values to the ranks whose queries need them, and their gradients back to the owners.

Each direction is one all-to-all of rows. Every rank knows the counts from the plan, so no shapes are exchanged and
the host waits for no device. Only rows that another rank holds travel; a rank copies its own rows locally.

If kernels on local keys run meanwhile, the transfer starts first and is waited for later: NCCL works on its own
stream, ordered after the current one. If nothing runs meanwhile, it works on the current stream, which costs the host
less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceExchange, Rows
from wlb_megatron.attention.kernels.row_sums import add_rows, join_rows

on_wait: Callable[[Callable[[], Any]], None] | None = None
"""If set, called with each wait for a transfer, so that a timer can measure it."""


def start_gather(
    exchange: DeviceExchange, kv: Tensor, group: Any, hidden: bool = True
) -> Callable[[int], Tensor]:
    """Starts to fetch the keys that this rank needs.

    `kv`, [t, 2, heads, dim], has the keys that it holds (ShardPlan.held_keys). `hidden` says that other kernels run
    meanwhile.

    Returns a function that waits and returns [rows, 2, heads, dim] for the requested number of rows: the first n in
    the order of the plan's key buffer, then rows that nothing reads.
    """
    if not exchange.remote:
        return lambda rows: join_rows(kv, kv, exchange.place, rows)
    wait = _travel(kv, exchange.sends, exchange.send_counts, exchange.recv_counts, group, hidden)
    return lambda rows: join_rows(kv, wait(), exchange.place, rows)


def start_return(
    exchange: DeviceExchange, grad: Tensor, group: Any, hidden: bool = True
) -> Callable[[], Tensor]:
    """Starts to return gradients to the owners of the keys. grad: [rows, 2, heads, dim], as start_gather returned
    rows.

    Returns a function that waits and returns what came back: the second source of exchange.returns, beside grad.
    """
    if not exchange.remote:
        return lambda: grad
    return _travel(grad, exchange.arrivals, exchange.recv_counts, exchange.send_counts, group, hidden)


def add_returned(exchange: DeviceExchange, grad: Tensor, back: Tensor, *targets: Tensor) -> None:
    """Adds gradients to those of the rank's own keys, [t, 2, heads, dim], and of each part of its cached keys.

    Sums are in fp32 at least, in rank order, rounded once. `back` is the result of start_return's function for grad.
    """
    for target, groups in zip(targets, exchange.returns, strict=True):
        add_rows(target, grad, groups, back)


def _travel(
    source: Tensor,
    rows: Rows,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    group: Any,
    hidden: bool,
) -> Callable[[], Tensor]:
    """Starts to send rows. Returns a function that waits for those that arrive, [sum of recv_counts, ..]."""
    sent_rows = source[rows] if isinstance(rows, slice) else source.index_select(0, rows)
    arrived, work = _all_to_all(sent_rows, send_counts, recv_counts, group, hidden or on_wait is not None)

    def wait() -> Tensor:
        if work is not None and on_wait is not None:
            on_wait(work.wait)
        elif work is not None:
            work.wait()
        return arrived

    return wait


def _all_to_all(
    sent_rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Any, hidden: bool
) -> tuple[Tensor, Any]:
    """What arrives, and the work to wait for first (None if the current stream orders it)."""
    arrived = sent_rows.new_empty((sum(recv_counts), *sent_rows.shape[1:]))
    work = dist.all_to_all_single(
        arrived, sent_rows, list(recv_counts), list(send_counts), group=group, async_op=hidden
    )
    return arrived, work
