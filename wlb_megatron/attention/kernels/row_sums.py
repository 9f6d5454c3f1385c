"""Gathers rows by index, and adds or merges (as attention does) the source rows that belong to each target row.

A token's keys and values lie side by side in one row, to gather, send and add them together.

A source may have more rows than have owners. An index below 0 is row ~index of a second source. On a GPU each
operation is one kernel, which reads and writes every row once (row_sums_triton.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from wlb_megatron.sharding.attention_calls import RowGroups

KV = TypeVar("KV", Tensor, tuple[Tensor, Tensor])
"""One row per key, as side_by_side makes them, or a pair of contiguous keys and values."""


def spread_rows(source: Tensor, index: Tensor, rows: int) -> Tensor:
    """source[index] at the start of a new buffer of `rows` rows. Nothing reads the remaining rows."""
    buffer = source.new_empty((rows, *source.shape[1:]))
    torch.index_select(source, 0, index, out=buffer.narrow(0, 0, len(index)))
    return buffer


def spread_four(sources: tuple[Tensor, Tensor, Tensor, Tensor], index: Tensor, rows: int) -> list[Tensor]:
    """spread_rows of each source, in one launch on a GPU instead of four."""
    if sources[0].is_cuda:
        return _fused().spread_four(sources, index, rows)
    return [spread_rows(source, index, rows) for source in sources]


def join_rows(source: Tensor, second_source: Tensor, index: Tensor, rows: int) -> Tensor:
    """A new buffer of `rows` rows: row i is row index[i] of source or, if that is below 0, row ~index[i] of
    second_source.

    Nothing reads the remaining rows. Tensors are [rows, ..], contiguous.
    """
    if source.is_cuda:
        return _fused().join_rows(source, second_source, index, rows)
    buffer = source.new_empty((rows, *source.shape[1:]))
    buffer[: len(index)] = _joined(source, second_source, index)
    return buffer


def add_rows(target: Tensor, source: Tensor, groups: RowGroups, second_source: Tensor | None = None) -> None:
    """Adds to each row of the target the rows of source and second_source that it owns.

    Tensors are [rows, ..], contiguous. Sums are in fp32 at least, rounded once.
    """
    second_source = source if second_source is None else second_source
    if target.is_cuda:
        _fused().add_rows(target, source, groups, second_source)
        return
    sum_dtype = torch.promote_types(target.dtype, torch.float32)
    owner, rows = (
        groups.targets.repeat_interleave(groups.bounds.diff()),
        _joined(source, second_source, groups.members),
    )
    target.copy_(target.to(sum_dtype).index_add(0, owner, rows.to(sum_dtype)))


def sum_pairs(source: Tensor, groups: RowGroups, second_source: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the rows that each target row owns, as add_rows to zeros. Every target row owns at least one.

    source, second_source: [rows, 2, ..]. Returns [targets, ..] of their first halves, and of their second halves.
    """
    if source.is_cuda:
        return _fused().sum_pairs(source, groups, second_source)
    sums = source.new_zeros((len(groups.targets), *source.shape[1:]))
    add_rows(sums, source, groups, second_source)
    return sums[:, 0].contiguous(), sums[:, 1].contiguous()


@cache
def _fused() -> Any:
    """row_sums_triton, which needs Triton. Imported in each call, which costs the host 1 us."""
    from wlb_megatron.attention.kernels import row_sums_triton

    return row_sums_triton


def _joined(source: Tensor, second_source: Tensor, index: Tensor) -> Tensor:
    both = torch.cat((source, second_source))
    return both.index_select(0, torch.where(index < 0, len(source) + ~index, index))


def merge_rows(out: Tensor, lse: Tensor, parts: Tensor, parts_lse: Tensor, groups: RowGroups) -> None:
    """Merges each row's parts of attention (over other keys) into it.

    out, parts: [rows, heads, dim]. lse, parts_lse: [rows, heads], fp32 or more, the log of each part's softmax
    denominator, which weights the parts. The sum is in lse's dtype, rounded once.
    """
    if out.is_cuda:
        _fused().merge_rows(out, lse, parts, parts_lse, groups)
        return
    owner = groups.targets.repeat_interleave(groups.bounds.diff()).long()
    parts, parts_lse = parts[groups.members], parts_lse[groups.members]
    top = lse.scatter_reduce(0, owner[:, None].expand_as(parts_lse), parts_lse, "amax")
    mine, theirs = torch.exp(lse - top), torch.exp(parts_lse - top[owner])
    total = mine.index_add(0, owner, theirs)
    merged_out = (mine[..., None] * out).index_add(0, owner, theirs[..., None] * parts)
    out.copy_(merged_out / total[..., None])
    lse.copy_(top + torch.log(total))


def side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """[keys, 2, kv heads, dim], or [keys, kv heads, dim + v dim] if values are narrower: one copy, from any strides."""
    if k.shape != v.shape:
        return torch.cat((k, v), dim=-1)
    if _in_sixteens(k) and _in_sixteens(v):
        # A GPU's strided stack is slow 2 bytes at a time: 0.12 ms for 32K keys of 4 heads of 128, so 0.03 (H200).
        complex_pairs = torch.stack((k.view(torch.complex128), v.view(torch.complex128)), dim=1)
        return complex_pairs.view(k.dtype)
    return torch.stack((k, v), dim=1)


def grads_apart(dkv: KV, dim: int) -> tuple[Tensor, Tensor]:
    """The two halves of side_by_side's gradient, each contiguous if they have the same dim, or the pair that it is.

    The next operation (a rotation, a concatenation) is slow on strided ones: 0.6 ms for 32K keys of 4 heads.
    """
    if isinstance(dkv, tuple) or dkv.dim() != 4:
        return apart(dkv, dim)
    in_sixteens = _in_sixteens(dkv)
    halves = (dkv.view(torch.complex128) if in_sixteens else dkv).transpose(0, 1).contiguous()
    dk, dv = halves.view(dkv.dtype) if in_sixteens else halves
    return dk, dv


def _in_sixteens(x: Tensor) -> bool:
    """Whether every row of the last dimension is a multiple of 16 bytes long, and starts at a multiple of 16 bytes."""
    *steps, last = x.stride()
    bits = x.storage_offset() | x.shape[-1]
    for step in steps:
        bits |= step
    # The elements in 16 bytes are a power of two, which divides numbers without any lower bits.
    return last == 1 and not bits & (16 // x.element_size() - 1) and not x.data_ptr() & 15


def empty_like(kv: KV) -> KV:
    """Room for its gradient, of the same form."""
    if isinstance(kv, tuple):
        return torch.empty_like(kv[0]), torch.empty_like(kv[1])
    return torch.empty_like(kv)


def apart(kv: KV, dim: int) -> tuple[Tensor, Tensor]:
    """The keys, [keys, kv heads, dim], and the values: the pair itself, or views."""
    if isinstance(kv, tuple):
        return kv
    if kv.dim() != 4:
        return kv[..., :dim], kv[..., dim:]
    k, v = kv.unbind(1)
    return k, v
