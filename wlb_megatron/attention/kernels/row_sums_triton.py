"""The GPU kernels of row_sums.py: one program for each row gathered, or for each target row that has sources.

A program that sums uses one warp. With several, one warp could store a row's new log-sum-exp before another has
loaded the old.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.runtime import driver  # type: ignore[import-untyped]

from wlb_megatron.sharding.attention_calls import RowGroups

Four = tuple[Tensor, Tensor, Tensor, Tensor]

# Before Triton 3.3, a compiled kernel does not take constants.
_STRAIGHT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    num_warps: int = 1,
) -> None:
    """Launches kernel[grid](*tensors, *numbers) without Triton's inspection of every argument.

    That inspection takes the host longer than the launch. What Triton compiles depends on types, numbers and whether
    tensors start at multiples of 16 bytes. If all do, the kernel compiled earlier for the same values is launched
    directly.
    """
    place, bits = tensors[0].get_device(), 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    aligned = not bits & 15
    key = id(kernel), place, numbers, *[tensor.dtype for tensor in tensors]
    if aligned and (compiled := _compiled.get(key)) is not None:
        stream = driver.active.get_current_stream(place)
        # As in CompiledKernel's own indexing, without the hooks of Triton's profiler.
        metadata = compiled.function, compiled.packed_metadata, None, None, None
        try:
            compiled.run(*grid, 1, stream, *metadata, *tensors, *numbers)
            return
        except TypeError:  # a Triton whose launcher takes other arguments
            global _STRAIGHT
            _STRAIGHT = False
            _compiled.clear()
    compiled = kernel[grid](*tensors, *numbers, num_warps=num_warps)
    if aligned and _STRAIGHT:
        _compiled[key] = compiled


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


@triton.jit
def _copy(source, target, source_row, to, width, column):  # type: ignore[no-untyped-def]
    inside = column < width
    tl.store(target + to * width + column, tl.load(source + source_row * width + column, inside), inside)


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    a, b, c, d, to_a, to_b, to_c, to_d, index, width_a, width_b, width_c, width_d, BLOCK: tl.constexpr
):
    to = tl.program_id(0).to(tl.int64)
    source_row = tl.load(index + to).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _copy(a, to_a, source_row, to, width_a, column)
    _copy(b, to_b, source_row, to, width_b, column)
    _copy(c, to_c, source_row, to, width_c, column)
    _copy(d, to_d, source_row, to, width_d, column)


def spread_four(sources: Four, index: Tensor, rows: int) -> list[Tensor]:
    """See row_sums.spread_four. Tensors contiguous, of any types and widths."""
    targets = [source.new_empty((rows, *source.shape[1:])) for source in sources]
    widths = [source.numel() // len(source) for source in sources]
    block = min(1024, _power(max(widths)))
    grid = len(index), -(-max(widths) // block)
    _launch(_spread, grid, (*sources, *targets, index), (*widths, block), num_warps=4)
    return targets


@triton.jit
def _pick(source, second_source, source_row, width, column, inside):  # type: ignore[no-untyped-def]
    """Row `source_row` of source, or row ~source_row of second_source if it is below 0."""
    mine = tl.load(source + source_row * width + column, inside & (source_row >= 0), 0.0)
    theirs = tl.load(second_source + (-1 - source_row) * width + column, inside & (source_row < 0), 0.0)
    return tl.where(source_row >= 0, mine, theirs)


@triton.jit
def _join(source, second_source, buffer, index, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    to = tl.program_id(0).to(tl.int64)
    source_row = tl.load(index + to).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    cells = _pick(source, second_source, source_row, width, column, inside)
    tl.store(buffer + to * width + column, cells, inside)


def join_rows(source: Tensor, second_source: Tensor, index: Tensor, rows: int) -> Tensor:
    """See row_sums.join_rows."""
    shape = source.shape[1:]
    buffer = source.new_empty((rows, *shape))
    if count := len(index):
        width = shape.numel()
        block = min(1024, _power(width))
        _launch(_join, (count, -(-width // block)), (source, second_source, buffer, index), (width, block), 4)
    return buffer


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    target, source, second_source, targets, bounds, members, width, BLOCK: tl.constexpr
):
    bag = tl.program_id(0)
    row = tl.load(targets + bag).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(target + row * width + column, inside, 0.0).to(tl.float32)
    for place in range(tl.load(bounds + bag), tl.load(bounds + bag + 1)):
        member = tl.load(members + place).to(tl.int64)
        total += _pick(source, second_source, member, width, column, inside).to(tl.float32)
    tl.store(target + row * width + column, total.to(target.dtype.element_ty), inside)


def add_rows(target: Tensor, source: Tensor, groups: RowGroups, second_source: Tensor) -> None:
    """See row_sums.add_rows."""
    if not (count := len(groups.targets)):
        return
    width = target.shape[1:].numel()
    block = min(1024, _power(width))
    tensors = target, source, second_source, groups.targets, groups.bounds, groups.members
    _launch(_add, (count, -(-width // block)), tensors, (width, block))


@triton.jit
def _sum_pairs(  # type: ignore[no-untyped-def]
    first, second, source, second_source, targets, bounds, members, half, BLOCK: tl.constexpr
):
    bag = tl.program_id(0)
    row = tl.load(targets + bag).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    begin, end = tl.load(bounds + bag), tl.load(bounds + bag + 1)
    one, two = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for place in range(begin, end):
        member = tl.load(members + place).to(tl.int64)
        one += _pick(source, second_source, member, 2 * half, column, inside).to(tl.float32)
        two += _pick(source, second_source, member, 2 * half, half + column, inside).to(tl.float32)
    tl.store(first + row * half + column, one.to(first.dtype.element_ty), inside)
    tl.store(second + row * half + column, two.to(second.dtype.element_ty), inside)


def sum_pairs(source: Tensor, groups: RowGroups, second_source: Tensor) -> tuple[Tensor, Tensor]:
    """See row_sums.sum_pairs."""
    count, shape = len(groups.targets), source.shape[2:]
    first, second = source.new_empty((count, *shape)), source.new_empty((count, *shape))
    if count:
        half = shape.numel()
        block = min(1024, _power(half))
        tensors = first, second, source, second_source, groups.targets, groups.bounds, groups.members
        _launch(_sum_pairs, (count, -(-half // block)), tensors, (half, block))
    return first, second


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out,
    lse,
    parts,
    parts_lse,
    targets,
    bounds,
    members,
    heads,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
):
    bag = tl.program_id(0)
    row = tl.load(targets + bag).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, PADDED)
    inside = head < heads
    cell = head[:, None] * DIM + column[None, :]
    valid = inside[:, None] & (column < DIM)[None, :]
    # Online: `total` and `merged_out` are relative to exp(top), the largest log-sum-exp so far.
    top = tl.load(lse + row * heads + head, inside, 0.0)
    total = tl.full([HEADS], 1.0, tl.float32)
    merged_out = tl.load(out + row * heads * DIM + cell, valid, 0.0).to(tl.float32)
    for place in range(tl.load(bounds + bag), tl.load(bounds + bag + 1)):
        member = tl.load(members + place).to(tl.int64)
        part_lse = tl.load(parts_lse + member * heads + head, inside, 0.0)
        part = tl.load(parts + member * heads * DIM + cell, valid, 0.0).to(tl.float32)
        higher = tl.maximum(top, part_lse)
        keep, add = tl.exp(top - higher), tl.exp(part_lse - higher)
        merged_out = merged_out * keep[:, None] + part * add[:, None]
        total = total * keep + add
        top = higher
    tl.store(out + row * heads * DIM + cell, (merged_out / total[:, None]).to(out.dtype.element_ty), valid)
    tl.store(lse + row * heads + head, top + tl.log(total), inside)


def merge_rows(out: Tensor, lse: Tensor, parts: Tensor, parts_lse: Tensor, groups: RowGroups) -> None:
    """See row_sums.merge_rows. Tensors contiguous, lse fp32."""
    heads, dim = out.shape[1:]
    padded = _power(dim)
    together = min(_power(heads), max(1, 1024 // padded))
    grid = len(groups.targets), -(-heads // together)
    tensors = out, lse, parts, parts_lse, groups.targets, groups.bounds, groups.members
    _launch(_merge, grid, tensors, (heads, dim, together, padded))
