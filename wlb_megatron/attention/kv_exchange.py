"""Moves the keys and values that other ranks' queries see, and their gradients back to the owners.

Both ways are one all-to-all of rows, whose counts every rank knows in advance: no shape is exchanged, no
device is waited for. It is started, then waited for, so that kernels on local keys run meanwhile (NCCL works
on a stream of its own and orders itself after the current one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceExchange

Finish = Callable[[], Tensor]


def start_gather(exchange: DeviceExchange, kv: Tensor, group: Any) -> Finish:
    """Begin fetching the keys this rank needs. kv: [t, 2, heads, dim], the rank's own.

    Returns a function that waits and gives [n, 2, heads, dim], prefixes of pieces in packed order.
    """
    if not exchange.remote:
        rows = exchange.send_rows[exchange.place]
        return lambda: kv.index_select(0, rows)
    sent = kv.index_select(0, exchange.send_rows)
    arrived, work = _all_to_all(sent, exchange.send_counts, exchange.recv_counts, group)

    def finish() -> Tensor:
        work.wait()
        return arrived.index_select(0, exchange.place)

    return finish


def start_return(exchange: DeviceExchange, grad: Tensor, group: Any) -> Finish:
    """Begin returning gradients to the owners of the keys. grad: [n, 2, heads, dim], as start_gather gave them.

    Returns a function that waits and gives [t, 2, heads, dim], summed over ranks (in fp32 at least, in rank
    order, so the same each time).
    """
    sent = grad.index_select(0, exchange.unplace)
    if exchange.remote:
        back, work = _all_to_all(sent, exchange.recv_counts, exchange.send_counts, group)
    else:
        back, work = sent, None

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        tokens = len(exchange.sum_bounds) - 1
        if len(back) == 0:
            return grad.new_zeros((tokens, *grad.shape[1:]))
        # A bag is a token, its items the rows that came back for it.
        summed = F.embedding_bag(
            exchange.sum_rows, back.flatten(1), exchange.sum_bounds, mode="sum", include_last_offset=True
        )
        return summed.view(tokens, *grad.shape[1:])

    return finish


def _all_to_all(
    sent: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Any
) -> tuple[Tensor, Any]:
    arrived = sent.new_empty((sum(recv_counts), *sent.shape[1:]))
    work = dist.all_to_all_single(
        arrived, sent, list(recv_counts), list(send_counts), group=group, async_op=True
    )
    return arrived, work
