"""The interface of every packer, and the job that it is made for.

Pieces that arrived go in, one iteration's grid of micro-batches comes out.

A packer packs the global batch into micro_batches x dp bins; dp only regroups the bins (arrange.py). So neither the
state, nor which documents train in which iteration, depends on the layout.
"""

from __future__ import annotations

import base64
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError, changes
from wlb_megatron.pipeline.step_law import StageRoom, StepLaw
from wlb_megatron.plan import IterationPlan, MicroBatch, Piece, Waiting
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN, CostModel

Grid = tuple[tuple[MicroBatch, ...], ...]
"""Micro-batches of one iteration: `grid[m][d]` is micro-batch m of data-parallel rank d."""


class Ranks(NamedTuple):
    """Data-parallel size, pipeline stages, model chunks per stage, and the number of which an interleaved schedule's
    micro-batches are a multiple. `rooms` are those of the first and the last stage if steps keep layers.
    """

    dp: int = 1
    pp: int = 1
    vpp: int = 1
    group: int = 1
    rooms: tuple[StageRoom, StageRoom] | None = None

    def law(self, cost: CostModel) -> StepLaw:
        """The law that predicts a step on these ranks."""
        costs = (cost.per_micro_batch, *cost.least_micro_batch, cost.per_chunk)
        per_micro_batch, forward, backward, chunk = (round(UNITS_PER_TOKEN * tokens) for tokens in costs)
        longer = Fraction(cost.backward).limit_denominator(1000)
        return StepLaw(
            *(self.pp, self.vpp, self.group, per_micro_batch, (forward, backward), chunk),
            backward=(longer.numerator, longer.denominator),
            again=round(1000 * (cost.backward - 2)),
            rooms=self.rooms,
        )


ONE_RANK = Ranks()


class Packed(NamedTuple):
    """One iteration's result.

    put_back: pieces of this iteration's arrivals that the packer cannot promise to train in time. The planner offers
    them again first in the next iteration, and they count as arriving then. Nearly always empty.
    """

    grid: Grid
    put_back: tuple[Piece, ...] = ()


Times = Callable[[Sequence[IterationPlan]], npt.NDArray[np.float64]]
"""Simulated time of each plan, in nanoseconds, see simulator.job.PlanTimes."""


@dataclass(frozen=True)
class PackingJob:
    """What a packer is made for.

    Args:
        window: tokens of --seq-length.
        micro_batches: windows of one data-parallel rank, in the largest global batch.
        vpp: model chunks per stage.
        group: the interleaved schedule takes a multiple of this many micro-batches (default: pp).
        alignment: a micro-batch's tokens are padded up to a multiple of it.
        sample: document lengths (tokens, at most the window) on which `thresholds=auto` is found; without one, a rule
            of thumb.
        longest: tokens of the longest piece, above the window only if overlong is "chunk" (default: the window).
        adopt_max_tokens: a loaded state keeps its own Lmax if that, padded, is at most this many tokens.
        no_chunks: (flag, cure) of each setting under which documents cannot train in chunks.
        rooms: those of the first and the last stage if steps keep as many layers as fit.
        times: simulates plans, by which `chunks=auto` chooses; None: it goes by the packer's prediction.
        say: called with a line on whether documents train in chunks, and why.
    """

    config: WlbConfig
    cost: CostModel
    _: KW_ONLY
    window: int
    micro_batches: int
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    group: int | None = None
    alignment: int = 1
    sample: Sequence[int] | None = None
    longest: int | None = None
    adopt_max_tokens: int = 0
    no_chunks: Sequence[tuple[str, str]] = ()
    rooms: tuple[StageRoom, StageRoom] | None = None
    times: Times | None = None
    say: Callable[[str], None] = lambda _: None

    @property
    def bins(self) -> int:
        """Windows of a global batch, over all ranks."""
        return self.micro_batches * self.dp

    @property
    def ranks(self) -> Ranks:
        group = (self.group or self.pp) if self.vpp > 1 else 1
        return Ranks(self.dp, self.pp, self.vpp, group, self.rooms)


class Packer(ABC):
    """State of one packing policy. Not thread-safe. Every rank runs its own, and all make the same plans."""

    bins: int
    """Windows of a global batch, over all ranks; of the largest one if batches grow. There are as many micro-batches,
    or as many more as the packer finds best."""

    law: StepLaw
    """What a step of these micro-batches is predicted to take."""

    max_tokens: int
    """Most tokens of a micro-batch, without end padding."""

    most_pieces: int
    """Pieces that can train for each window of a global batch at most: no more are taken in."""

    held_tokens: int = 0
    """Tokens that a pipeline stage holds at once at most, where groups of micro-batches hold more than the schedule
    does by itself (chunk_packer.py); 0: no more than that."""

    batch_spread: int | None = None
    """Percent of a global batch's tokens that a step should not exceed; None: no bound. It may change between two
    calls of `pack`."""

    @property
    def longest_delay(self) -> int:
        """Iterations that a document may wait in a queue, to train in a fuller step; 0 if none does."""
        return 0

    @property
    @abstractmethod
    def waiting(self) -> tuple[Piece, ...]:
        """Pieces that arrived and have not trained, oldest first."""

    @abstractmethod
    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        """One iteration's micro-batches.

        Args:
            arrived: pieces in stream order, none empty or longer than the window (with chunks: than the longest
                document).
            bins: windows of this global batch, over all ranks. They may grow from one iteration to the next.
            draining: the stream has ended, so release what waits. Only then may a micro-batch be empty, and only if
                nothing waits any more.
        """

    @abstractmethod
    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """A function that returns what `state` returns now, even after later calls of `pack`. It is cheap, because
        one is taken in each iteration and few are called.
        """

    def state(self) -> dict[str, Any]:
        """What waits, as JSON-able integers. Call it between two calls of `pack`."""
        return self.snapshot()()

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError that names the setting if it was made with other settings."""


def read_per_window(text: str) -> float | None:
    """Micro-batches per window from `config.micro_batches_per_window`; None for auto."""
    message = (
        f"--wlb-micro-batches-per-window {text!r} is neither auto nor a number from 1 to {MOST_PER_WINDOW}"
    )
    return None if text == "auto" else number_in(text, MOST_PER_WINDOW, message)


def number_in(text: str, limit: float, message: str) -> float:
    """The number from 1 to the limit that a setting names. WlbError with the message if it names none."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= limit:
        raise WlbError(message)
    return value


def per_window_of(config: WlbConfig) -> float | None:
    """Micro-batches per window of a packer of variable length; None for as many as give the least predicted step.

    Dynamic groups decide by themselves how many micro-batches there are.
    """
    if config.cp_mode == "dynamic":
        return 1
    return read_per_window(config.micro_batches_per_window)


MOST_PER_WINDOW = 64


def most_per_window(law: StepLaw, per_window: float | None, *, always: bool = False) -> int:
    """The most micro-batches per window, rounded up to a whole number; see StepLaw.counts."""
    return law.counts(law.group, per_window, always=always)[-1] // law.group


def check_settings(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises ValueError that names every setting in which a saved state differs from this run."""
    if changed := changes(saved, now, value=repr):
        raise WlbError(
            f"the saved packing state does not fit these settings: {'; '.join(changed)}: set them as before"
        )


def encode(waiting_pieces: Iterable[Waiting]) -> str:
    """Waiting pieces as text for a checkpoint.

    Columns epoch, document, start, end, entry as little-endian int64, compressed, in base64.
    """
    items = list(waiting_pieces)
    pieces = chain.from_iterable(item.piece for item in items)
    rows = np.fromiter(pieces, dtype="<i8", count=5 * len(items)).reshape(-1, 5)
    rows[:, 4] = np.fromiter((item.entry for item in items), dtype="<i8", count=len(items))
    return base64.b64encode(zlib.compress(rows.T.tobytes(), 1)).decode()


def decode(saved: str) -> list[Waiting]:
    """What was encoded."""
    try:
        columns = np.frombuffer(zlib.decompress(base64.b64decode(saved)), dtype="<i8").reshape(5, -1).tolist()
    except (ValueError, zlib.error):
        raise WlbError("the packing state is damaged: resume from another checkpoint") from None
    pieces = map(tuple.__new__, repeat(Piece), zip(*columns[:4], repeat(0)))  # the last has no end
    return list(map(Waiting, pieces, columns[4]))


def packed_waiting(packer: Mapping[str, Any]) -> list[Waiting]:
    """What waits by a packer's state, oldest first."""
    if "planned" in packer:
        raise WlbError("the state is of --wlb-packing fixed-greedy, which this release does not have")
    return sorted(decode(packer["waiting"]), key=lambda item: item.entry)
