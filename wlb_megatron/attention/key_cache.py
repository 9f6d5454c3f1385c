"""Keeps a chunk's keys and values for later micro-batches of a step, and sums the gradients that come back to them.

The forward of a chunk keeps its keys; later chunks of the document read them. A document's chunks run backward last
first. Each adds the gradients of the keys that it read to an fp32 sum. The chunk that made the keys adds that sum in
its own backward, and then frees both. Autograd does not see any of this.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCache
from wlb_megatron.sharding.chunks import Taken

_caches: weakref.WeakSet[KeyCache] = weakref.WeakSet()


def clear_caches() -> None:
    """Drops everything that any layer still keeps. Call it where a step begins, ends or fails."""
    for cache in list(_caches):
        cache.clear()


def cached_bytes() -> int:
    """Bytes that all layers keep now, gradients included."""
    return sum(cache.bytes for cache in list(_caches))


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

    @property
    def bytes(self) -> int:
        tensors = [
            part for entry in self._entries.values() for part in (entry.kv, entry.grad) if part is not None
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def start(self, use: DeviceCache) -> bool:
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

    def keep(self, use: DeviceCache, kv: Tensor) -> None:
        """Keeps the rows of kv that later micro-batches read, unless an earlier forward of this micro-batch has."""
        for piece, rows in use.keeps:
            if (use.micro_batch, piece) not in self._entries:
                saved = kv if rows is None else kv.index_select(0, rows)
                self._entries[use.micro_batch, piece] = _Entry(saved)

    def take(self, use: DeviceCache, kv: Tensor) -> Tensor:
        """The rank's own keys, followed by those of earlier micro-batches: the rows that the exchange sends from."""
        return torch.cat((kv, *(self._entry(take, use).kv for take in use.takes))) if use.takes else kv

    def gradients(self, use: DeviceCache) -> list[Tensor]:
        """The tensors in which the gradients of each of the takes are summed, in fp32 at least."""
        gradients = []
        for take in use.takes:
            entry = self._entry(take, use)
            if entry.grad is None:
                sum_dtype = torch.promote_types(entry.kv.dtype, torch.float32)
                entry.grad = torch.zeros_like(entry.kv, dtype=sum_dtype)
            gradients.append(entry.grad)
        return gradients

    def finish(self, use: DeviceCache, dkv: Tensor) -> None:
        """Ends a backward: adds to dkv what came back for the keys that were kept, and drops them.

        Raises RuntimeError if a later chunk's backward is still to come.
        """
        for take in use.takes:
            self._entry(take, use).readers -= 1
        for piece, rows in use.keeps:
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

    def _entry(self, take: Taken, use: DeviceCache) -> _Entry:
        entry = self._entries.get((take.micro_batch, take.piece))
        if entry is None:
            raise RuntimeError(
                f"micro-batch {use.micro_batch} sees keys of micro-batch {take.micro_batch}, of which the layer keeps "
                "none: all micro-batches that share a document belong to one step, in order"
            )
        return entry
