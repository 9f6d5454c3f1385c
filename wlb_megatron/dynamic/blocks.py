"""The groups that may be formed over the DP x CP ranks of a pipeline stage: aligned blocks, nested in each other.

Sizes are a chain in which each divides the next, so two blocks are either apart or one holds the other. A rank is in
one block of each size, of which there are at most MOST_GROUPS of more than one rank. And micro-steps that run in
falling order of their group's size never wait: all ranks of a block have run the same larger blocks before it (see
place_greedily).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_GROUPS = 8
"""Process groups of a rank, with Megatron's context-parallel group and that of all ranks, which are there anyway."""


def block_sizes(context: int, data: int) -> tuple[int, ...]:
    """Sizes of blocks, ascending, from 1 over the context-parallel size to all context x data ranks.

    context 2, data 3: (1, 2, 6). context 4, data 2: (1, 2, 4, 8). context 3, data 2: (1, 3, 6). Where there would be
    more than MOST_GROUPS above 1, the largest are left out, which hold no more tokens than the context-parallel ones;
    context 8, data 512: 1 2 4 8 16 32 64 128 4096.
    Raises ValueError for sizes below 1.
    """
    if context < 1 or data < 1:
        raise ValueError(f"context- and data-parallel sizes must be at least 1, got {context} and {data}")
    sizes = [1]
    for factor in (*_primes(context), *_primes(data)):
        sizes.append(sizes[-1] * factor)
    kept_sizes = {1, context, sizes[-1]}
    other_sizes = [size for size in sizes if size not in kept_sizes]
    return tuple(sorted({*kept_sizes, *other_sizes[: MOST_GROUPS + 1 - len(kept_sizes)]}))


@dataclass(frozen=True, slots=True)
class Stage:
    """The ranks of a pipeline stage as blocks, and what fits a group of each size.

    Blocks have these `sizes`, ascending, the last is all ranks. `tokens` has for each size the most of one micro-step.
    """

    sizes: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return self.sizes[-1]

    def divided(self, parts: int) -> Stage:
        """The same with micro-steps of so many times fewer tokens; all ranks together keep theirs, so that every
        document fits somewhere."""
        return Stage(self.sizes, (*(max(n // parts, 1) for n in self.tokens[:-1]), self.tokens[-1]))

    @staticmethod
    def of(context: int, data: int, max_tokens: int) -> Stage:
        """max_tokens: tokens of a micro-batch of `context` ranks, Lmax. A rank holds at most longest // context of
        them, and no group's micro-step more than Lmax, so that no rank holds more keys than with fixed groups.

        context 2, data 2, Lmax 96: 48, 96, 96 tokens on groups of 1, 2, 4.
        """
        sizes = block_sizes(context, data)
        return Stage(sizes, tuple(min(size * (max_tokens // context), max_tokens) for size in sizes))


def blocks_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(start, size) of every block of at least two ranks, in the one order in which all ranks create them."""
    return [(start, size) for size in sizes if size > 1 for start in range(0, sizes[-1], size)]


def _primes(number: int) -> list[int]:
    """Prime factors, ascending: 12 gives [2, 2, 3]."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
