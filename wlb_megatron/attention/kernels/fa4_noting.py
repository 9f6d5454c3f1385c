"""Notes which compiled kernels FlashAttention-4's functions launch, and compares what they give them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
Kernel = Callable[..., Any]
_one_at_a_time = Lock()


class Buffer(NamedTuple):
    """What stands for a tensor among noted arguments. Noting it does not keep its memory."""

    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def noted(run: Callable[[], Any], functions: Sequence[Any]) -> tuple[Any, list[tuple[Kernel, Arguments]]]:
    """The result of `run`, and what these functions launched meanwhile: kernels and arguments, in order.

    Each function keeps its compiled kernels in an attribute, `compile_cache`.
    """
    launches: list[tuple[Kernel, Arguments]] = []
    with _one_at_a_time:
        before = [function.compile_cache for function in functions]
        try:
            for function in functions:
                function.compile_cache = _Noting(function.compile_cache, launches)
            return run(), launches
        finally:
            for function, kernels in zip(functions, before, strict=True):
                function.compile_cache = kernels


class _Noting:
    """A cache of compiled kernels that also notes each launch."""

    def __init__(self, kernels: Any, launches: list[tuple[Kernel, Arguments]]) -> None:
        self.kernels, self.launches = kernels, launches

    def __contains__(self, key: Any) -> bool:
        return key in self.kernels

    def __setitem__(self, key: Any, kernel: Kernel) -> None:
        self.kernels[key] = kernel

    def __getitem__(self, key: Any) -> Kernel:
        kernel = self.kernels[key]

        def launch(*arguments: Any) -> None:
            self.launches.append((kernel, described(arguments)))
            kernel(*arguments)

        return launch


def described(arguments: Arguments) -> Arguments:
    """The arguments with a Buffer for each tensor."""
    return tuple(
        Buffer(x.data_ptr(), x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in arguments
    )


def same(theirs: Sequence[Arguments], ours: Sequence[Arguments], given: Sequence[Tensor]) -> bool:
    """Whether described arguments are the same. given: the tensors that both were given.

    Other tensors are working memory: they must be alike, and one of ours must stand for each of theirs.
    """
    if [len(arguments) for arguments in theirs] != [len(arguments) for arguments in ours]:
        return False
    stands_for = {tensor.data_ptr(): tensor.data_ptr() for tensor in given}
    for one, other in zip(chain(*theirs), chain(*ours), strict=True):
        if isinstance(one, Buffer) and isinstance(other, Buffer):
            equal = one[1:] == other[1:]
            equal &= stands_for.setdefault(one.address, other.address) == other.address
        else:
            equal = one is other or one == other
        if not equal:
            return False
    return len(set(stands_for.values())) == len(stands_for)
