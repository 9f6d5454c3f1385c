"""How many micro-batches a global batch has: a constant, or a number that grows with the samples trained."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from wlb_megatron.errors import WlbError


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Sizes of global batches by the samples trained before them, as Megatron counts.

    An iteration's sample count is its global batch size, however many documents or tokens it trains. steps: (samples,
    size): from that many samples on, a global batch has `size` micro-batches over all ranks. The first begins at 0;
    both rise. Example: with (0, 2), (5, 4) the iterations begin at 0, 2, 4, 6, 10 samples and have 2, 2, 2, 4, 4
    micro-batches: one that has begun keeps its size.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        rises = all(a < b and low < high for (a, low), (b, high) in pairwise(self.steps))
        if not self.steps or self.steps[0][0] or self.steps[0][1] < 1 or not rises:
            sizes = " ".join(f"{start}:{size}" for start, size in self.steps)
            raise WlbError(
                f"batch sizes {sizes} (samples:size) must begin at 0 and rise: Megatron trains growing batches only"
            )

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        return cls(((0, size),))

    def rounded(self, multiple: int) -> BatchSchedule:
        """Sizes rounded down to a multiple; with 4, sizes 4 and 6 become 4 and 4. WlbError where one is below it."""
        if self.steps[0][1] < multiple:
            raise WlbError(
                f"a global batch of {self.steps[0][1]} cannot be decreased to a multiple of {multiple}"
            )
        sizes = {
            size // multiple * multiple: start for start, size in reversed(self.steps)
        }  # on a tie, the first
        return BatchSchedule(tuple((start, size) for size, start in reversed(sizes.items())))

    def joined(self, windows: int) -> BatchSchedule:
        """The same counted in micro-batches of so many windows each, which must divide every size: 0:4, 10:8 by 4
        is 0:1, 3:2 (its iterations begin at 0, 4, 8, 12 windows, and the first of 10 or more at 12)."""
        return BatchSchedule(
            tuple({-(-start // windows): size // windows for start, size in self.steps}.items())
        )

    @property
    def largest(self) -> int:
        return self.steps[-1][1]

    def size(self, samples: int) -> int:
        """Micro-batches of the iteration that begins after `samples` samples."""
        return max(size for start, size in self.steps if start <= samples)

    def alike(self, samples: int, limit: int) -> int:
        """How many iterations from `samples` on have the same size as the next one, at most `limit`."""
        size = self.size(samples)
        change = min((start for start, _ in self.steps if start > samples), default=None)
        return limit if change is None else min(limit, -(-(change - samples) // size))

    def from_now(self, samples: int) -> list[int]:
        """The next iteration's size and all later ones."""
        return [self.size(samples), *(size for start, size in self.steps if start > samples)]

    def before(self, samples: int) -> tuple[tuple[int, int], ...]:
        """The steps that iterations up to `samples` can have used."""
        return tuple(step for step in self.steps if step[0] < max(samples, 1))


def linear_ramp(start: int, increment: int, samples: int, size: int) -> BatchSchedule:
    """Megatron's --rampup-batch-size START INCREMENT SAMPLES with --global-batch-size `size`: an equal share of
    `samples` at each size below. 2, 2, 100 up to 6 is 0:2, 50:4, 100:6.
    """
    if start < 1 or increment < 1 or samples < 0 or size < start or (size - start) % increment:
        raise WlbError(
            f"--rampup-batch-size {start} {increment} {samples} does not lead to --global-batch-size {size}: "
            "global batch less start must be a multiple of a positive increment"
        )
    rises = (size - start) // increment
    steps = {0: start}
    for i in range(1, rises + 1):
        steps[_first(i, samples, rises)] = start + i * increment  # if two coincide, the later
    return BatchSchedule(tuple(steps.items()))


def _first(rise: int, samples: int, rises: int) -> int:
    """From how many samples on the batch has risen so often: by Megatron's own division, in floating point."""
    if not samples:
        return 0
    sample = max(rise * samples // rises - 1, 0)
    while int(sample / (samples / rises)) < rise and sample <= samples:
        sample += 1
    return sample
