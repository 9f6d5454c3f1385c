"""Sends keys and values to the ranks whose queries need them, and their gradients back to the owners; and keeps those
of a chunk for later micro-batches of a step.

Each direction is one all-to-all of rows. Every rank knows the counts from the plan, so no shapes are exchanged and
the host waits for no device. Only rows that another rank holds travel; a rank copies its own rows locally.

If kernels on local keys run meanwhile, the transfer starts first and is waited for later: NCCL works on its own
stream, ordered after the current one. If nothing runs meanwhile, it works on the current stream, which costs the host
less.

The forward of a chunk keeps its keys; later chunks of the document read them. A document's chunks run backward last
first. Each adds the gradients of the keys that it read to an fp32 sum. The chunk that made the keys adds that sum in
its own backward, and then frees both. Autograd does not see any of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wlb_megatron.attention.kernels.row_sums import add_rows, join_rows
from wlb_megatron.sharding.attention_calls import Array, CachedKeys, ExchangePlan, Taken

on_wait: Callable[[Callable[[], Any]], None] | None = None
"""If set, called with each wait for a transfer, so that a timer can measure it."""


def start_gather(
    exchange: ExchangePlan, kv: Tensor, group: Any, hidden: bool = True
) -> Callable[[int], Tensor]:
    """Starts to fetch the keys that this rank needs.

    `kv`, [t, 2, heads, dim], has the keys that it holds (ShardPlan.held_keys). `hidden` says that other kernels run
    meanwhile.

    Returns a function that waits and returns [rows, 2, heads, dim] for the requested number of rows: the first n in
    the order of the plan's key buffer, then rows that nothing reads.
    """
    if not exchange.remote:
        return lambda rows: join_rows(kv, kv, exchange.place, rows)
    wait = _travel(kv, exchange.send_rows, exchange.send_counts, exchange.recv_counts, group, hidden)
    return lambda rows: join_rows(kv, wait(), exchange.place, rows)


def start_return(
    exchange: ExchangePlan, grad: Tensor, group: Any, hidden: bool = True
) -> Callable[[], Tensor]:
    """Starts to return gradients to the owners of the keys. grad: [rows, 2, heads, dim], as start_gather returned
    rows.

    Returns a function that waits and returns what came back: the second source of exchange.returns, beside grad.
    """
    if not exchange.remote:
        return lambda: grad
    return _travel(grad, exchange.arrivals, exchange.recv_counts, exchange.send_counts, group, hidden)


def add_returned(exchange: ExchangePlan, grad: Tensor, back: Tensor, *targets: Tensor) -> None:
    """Adds gradients to those of the rank's own keys, [t, 2, heads, dim], and of each part of its cached keys.

    Sums are in fp32 at least, in rank order, rounded once. `back` is the result of start_return's function for grad.
    """
    for target, groups in zip(targets, exchange.returns, strict=True):
        add_rows(target, grad, groups, back)


def _travel(
    source: Tensor,
    rows: slice | Array,
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


_caches: weakref.WeakSet[KeyCache] = weakref.WeakSet()


def clear_caches() -> None:
    """Drops everything that any layer still keeps. Call it where a step begins, ends or fails."""
    for cache in list(_caches):
        cache.clear()


@dataclass
class _Entry:
    """Keys of one piece on this rank. readers: later micro-batches that read them and have not run backward yet."""

    kv: Tensor
    grad: Tensor | None = None
    readers: int = 0


class KeyCache:
    """The cache of one layer. Calls per micro-batch: start, keep, take (again if keys are not saved), gradients,
    finish.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._recorded: dict[int, bool] = {}

    def clear(self) -> None:
        self._entries.clear()
        self._recorded.clear()

    def start(self, use: CachedKeys) -> bool:
        """Begins a forward. Returns whether it may save exchanged keys, so that backward need not take them again.

        The answer is the same on all ranks, because they exchange together. If every chunk saved them, each would
        hold a second copy of all earlier keys until its backward. If the first forward is not recorded
        (recomputation), the second one runs just before backward and may save. (Checkpoints that record both forwards
        need the same tensors saved in both.)
        """
        if use.micro_batch not in self._recorded:
            _caches.add(self)
            self._recorded[use.micro_batch] = torch.is_grad_enabled()
            for take in use.takes:
                self._entry(take, use).readers += 1
        return not use.prefixed or not self._recorded[use.micro_batch]

    def keep(self, use: CachedKeys, kv: Tensor) -> None:
        """Keeps the rows of kv that later micro-batches read, unless an earlier forward of this micro-batch has."""
        for piece, rows in ((keep.piece, keep.rows) for keep in use.keeps):
            if (use.micro_batch, piece) not in self._entries:
                saved = kv if rows is None else kv.index_select(0, rows)
                self._entries[use.micro_batch, piece] = _Entry(saved)

    def take(self, use: CachedKeys, kv: Tensor) -> Tensor:
        """The rank's own keys, followed by those of earlier micro-batches: the rows that the exchange sends from."""
        return torch.cat((kv, *(self._entry(take, use).kv for take in use.takes))) if use.takes else kv

    def gradients(self, use: CachedKeys) -> list[Tensor]:
        """The tensors in which the gradients of each of the takes are summed, in fp32 at least."""
        gradients = []
        for take in use.takes:
            entry = self._entry(take, use)
            if entry.grad is None:
                sum_dtype = torch.promote_types(entry.kv.dtype, torch.float32)
                entry.grad = torch.zeros_like(entry.kv, dtype=sum_dtype)
            gradients.append(entry.grad)
        return gradients

    def finish(self, use: CachedKeys, dkv: Tensor) -> None:
        """Ends a backward: adds to dkv what came back for the keys that were kept, and drops them.

        Raises RuntimeError if a later chunk's backward is still to come.
        """
        for take in use.takes:
            self._entry(take, use).readers -= 1
        for piece, rows in ((keep.piece, keep.rows) for keep in use.keeps):
            entry = self._entries.pop((use.micro_batch, piece))
            if entry.readers:
                raise RuntimeError(
                    f"backward of micro-batch {use.micro_batch} before that of {entry.readers} later ones that see its "
                    "keys: a document's chunks go backward last first"
                )
            if entry.grad is None:
                continue
            if rows is None:
                dkv += entry.grad
            else:
                dkv.index_copy_(0, rows.long(), (dkv.index_select(0, rows) + entry.grad).to(dkv.dtype))
        self._recorded.pop(use.micro_batch, None)

    def _entry(self, take: Taken, use: CachedKeys) -> _Entry:
        entry = self._entries.get((take.micro_batch, take.piece))
        if entry is None:
            raise RuntimeError(
                f"micro-batch {use.micro_batch} sees keys of micro-batch {take.micro_batch}, of which the layer keeps "
                "none: all micro-batches that share a document belong to one step, in order"
            )
        return entry
