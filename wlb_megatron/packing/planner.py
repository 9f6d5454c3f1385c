"""Makes one plan per iteration from a stream of documents: intake, release, drain. Each is audited before it trains."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.packer import Grid, Packer, encode
from wlb_megatron.pipeline.orders import groups
from wlb_megatron.plan import IterationPlan, Piece

STATE_VERSION = 3


class Planner:
    """Returns one IterationPlan per call.

    Intake: an iteration takes pieces until the running total reaches the tokens of all global batches up to its own;
    the piece that crosses that total is taken. No piece has more tokens than a data-parallel rank's share of an
    iteration, so each takes in at least one. Example: with 10 global tokens and pieces of 4, iteration 0 takes 3
    (total 12), iteration 1 takes 2 (20).

    * Pieces that a packer puts back are taken again first, and count again. The stream then runs that much slower,
      and `put_back` counts them.
    * No more pieces are taken than could train: with tiny ones, fewer tokens than asked for.
    * A finite stream is drained: iterations continue until nothing waits. Where `until` is set, the iteration that
      ends there takes in all that is left, and trains it with all that waits, in as many micro-batches as it takes.
    * Each plan is audited: what waited and what arrived trains or waits, each token once, under Lmax.
    """

    def __init__(
        self,
        stream: DocumentStream,
        packer: Packer,
        *,
        global_tokens: int,
        schedule: BatchSchedule | None = None,
    ) -> None:
        """global_tokens: tokens of a global batch of packer.bins micro-batches, bins x window. schedule: given if
        global batches grow; packer.bins is the largest.
        """
        self.stream = stream
        self.packer = packer
        self.global_tokens = global_tokens
        self.schedule = schedule or BatchSchedule.constant(packer.bins)
        self.iteration = 0
        self.samples = 0  # of all iterations so far, as Megatron counts them
        self.began = 0  # samples at which this order began, in a run that has trained with another
        self.taken = 0  # tokens; a Python integer, so it does not end at 2**31
        self.put_back = 0  # pieces, so far
        self.trained = 0  # tokens of all iterations so far
        self.above_spread = 0  # iterations so far with more tokens than packer.batch_spread
        self.until: int | None = None  # samples after which the run ends
        self._put_back: deque[Piece] = deque()
        self._waiting = packer.waiting  # after the last plan
        self._ended = False

    def begin_at(
        self, samples: int, first_pieces: Sequence[Piece] = (), trained_tokens: int | None = None
    ) -> None:
        """Begins an order in a run that has trained `samples` samples of another one; batches have the size due
        there.

        first_pieces: pieces that come before the stream's. trained_tokens: tokens so far, if known.
        """
        self.samples, self.taken, self.began = samples, self._tokens(samples), samples
        self.trained = self.taken if trained_tokens is None else trained_tokens
        self._put_back = deque(first_pieces)
        if self.packer.waiting:  # of a state that was loaded before
            self.packer.load_state({**self.packer.state(), "waiting": encode([])})
        self._waiting = self.packer.waiting
        self.iteration = self.put_back = 0
        self._ended = False

    def next_iteration(self) -> IterationPlan | None:
        """The next iteration's plan, or None when a finite stream has ended and nothing waits."""
        bins = self.schedule.size(self.samples)
        last = self.until is not None and self.samples + bins >= self.until
        arrived = self._take_in(bins, all_left=last)
        if self._ended and not arrived and not self._waiting:
            return None
        grid, put_back = self.packer.pack(self.iteration, arrived, bins, self._ended)
        while last and (put_back or self.packer.waiting):
            more_rows, put_back = self.packer.pack(self.iteration, put_back, bins, True)
            grid += more_rows
        if put_back:
            refused_pieces = frozenset(put_back)
            arrived = [piece for piece in arrived if piece not in refused_pieces]
            self._put_back.extendleft(reversed(put_back))
            self.put_back += len(put_back)
        waiting_now = self.packer.waiting
        trained_tokens = audit(self.packer, self.iteration, [*self._waiting, *arrived], grid, waiting_now)
        columns, law = list(zip(*grid, strict=True)), self.packer.law
        works = [[micro_batch.work for micro_batch in column] for column in columns]
        plan = IterationPlan(
            self.iteration,
            tuple(arrived),
            grid,
            waiting_now,
            predicted=law.step(
                works,
                [groups([micro_batch.pieces for micro_batch in column]) for column in columns],
                [[micro_batch.tokens for micro_batch in column] for column in columns],
            ),
            ideal=law.ideal(sum(map(sum, works)) // len(columns)),
        )
        self._waiting = waiting_now
        self.iteration += 1
        self.samples += bins
        self.trained += trained_tokens
        spread_percent = self.packer.batch_spread
        self.above_spread += (
            spread_percent is not None and 100 * trained_tokens > spread_percent * self._tokens(bins)
        )
        return plan

    def _take_in(self, bins: int, *, all_left: bool = False) -> list[Piece]:
        """The next pieces of a global batch of so many windows; all_left: all that the stream still has."""
        arrived: list[Piece] = []
        goal = self._tokens(self.samples + bins)
        piece_limit = bins * self.packer.most_pieces
        # Bound to local names, because this runs for every piece.
        taken_tokens, returned = self.taken, self._put_back
        following, arrive = self.stream.next, arrived.append
        while taken_tokens < goal or all_left:
            if len(arrived) >= piece_limit and not all_left:
                taken_tokens = goal  # the stream runs slower, as when pieces are put back
                break
            piece = returned.popleft() if returned else following()
            if piece is None:
                self._ended = True
                break
            arrive(piece)
            taken_tokens += piece[3] - piece[2]
        self.taken = taken_tokens
        return arrived

    def _tokens(self, samples: int) -> int:
        return samples * self.global_tokens // self.packer.bins

    def state(self) -> dict[str, Any]:
        """JSON-able; belongs to the iterations yielded so far."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """What `state` returns now, made when called: cheap to take in each iteration."""
        packer = self.packer.snapshot()
        own_state = {
            "version": STATE_VERSION,
            "iteration": self.iteration,
            "samples": self.samples,
            "began": self.began,
            "taken": self.taken,
            "trained": self.trained,
            "above_spread": self.above_spread,
            "ended": self._ended,
            "put_back": [list(piece[:4]) for piece in self._put_back],
            "put_back_so_far": self.put_back,
            "sample_tokens": self._tokens(1),
            "batches": [list(step) for step in self.schedule.steps],
            "stream": self.stream.state(),
        }
        return lambda: {**own_state, "packer": packer()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues after the iteration at which `state` was taken. Raises ValueError if it does not fit.

        The schedule may differ for what has not been taken in yet.
        """
        if state.get("version") != STATE_VERSION:
            raise WlbError(
                f"planner state of version {state.get('version')!r}, this release reads {STATE_VERSION}: "
                "resume with the release that wrote it"
            )
        if state["sample_tokens"] != self._tokens(1):
            raise WlbError(
                f"the saved plan has windows of {state['sample_tokens']} tokens, this run of {self._tokens(1)}: keep "
                "--seq-length and --micro-batch-size"
            )
        saved = BatchSchedule(tuple((int(start), int(size)) for start, size in state["batches"]))
        samples = int(state["samples"])
        if saved.before(samples) != self.schedule.before(samples):
            raise WlbError(
                f"the saved plan had global batches of {_describe(saved)}, this run has "
                f"{_describe(self.schedule)}: keep "
                f"--global-batch-size or --step-batch-size-schedule as they were up to sample {samples}"
            )
        self.stream.load_state(state["stream"])
        self.packer.load_state(state["packer"])
        self.began = int(state["began"])
        self.iteration = int(state["iteration"])
        self.samples = samples
        self.taken = int(state["taken"])
        self._waiting = self.packer.waiting
        self.trained = int(state["trained"])
        self.above_spread = int(state["above_spread"])
        # A run that had ended may go on for more epochs.
        self._ended = bool(state["ended"]) and self.until is None
        self.put_back = int(state["put_back_so_far"])
        self._put_back = deque(Piece(*row) for row in state["put_back"])


def _describe(schedule: BatchSchedule) -> str:
    """4, or 2, from sample 100 on 4."""
    return ", ".join(
        f"from sample {start} on {size}" if start else str(size) for start, size in schedule.steps
    )


_CURE = "this is a fault of the packer, please report it; to train on, choose another --wlb-packing"


def audit(
    packer: Packer, iteration: int, before: Sequence[Piece], grid: Grid, waiting_now: Sequence[Piece]
) -> int:
    """Tokens that train in this iteration. WlbError if they and those that wait are not exactly those of `before`.

    before: pieces that waited, then those that arrived. waiting_now: those that wait now. A packer may cut pieces.
    Those that it did not cut cancel out as equal tuples, which takes less than 0.1 us each.
    """
    micro_batches = [micro_batch for row in grid for micro_batch in row]
    tokens = [micro_batch.tokens for micro_batch in micro_batches]
    after = [*chain.from_iterable(micro_batch.pieces for micro_batch in micro_batches), *waiting_now]
    if problem := _difference(before, after):
        count, wait = _tokens(before), _tokens(waiting_now)
        raise WlbError(
            f"{type(packer).__name__} was given {count:,} tokens in iteration {iteration}, trains {sum(tokens):,} and "
            f"lets {wait:,} wait, but {problem}: {_CURE}"
        )
    if max(tokens) > packer.max_tokens:
        raise WlbError(
            f"{type(packer).__name__} made a micro-batch of {max(tokens):,} tokens in iteration {iteration}, above its "
            f"limit of {packer.max_tokens:,}: {_CURE}"
        )
    return sum(tokens)


def _difference(before: Sequence[Piece], after: Sequence[Piece]) -> str:
    """Says of which document's tokens there are fewer or more after than before; empty if there are none.

    Each piece counts +1 at its start and -1 at its end. Where a piece was cut these cancel: [0, 3) and [3, 8) count as
    [0, 8) does.
    """
    before_set, after_set = set(before), set(after)
    if len(before_set) == len(before) and len(after_set) == len(after):
        # No piece comes twice: only cut ones can differ.
        before, after = list(before_set - after_set), list(after_set - before_set)
        if not before and not after:
            return ""
    starts, ends = itemgetter(0, 1, 2), itemgetter(0, 1, 3)
    expected = Counter(chain(map(starts, before), map(ends, after)))
    counts = Counter(chain(map(starts, after), map(ends, before)))
    if expected == counts:
        return ""
    epoch, document, start = place = min(x for x in {*expected, *counts} if expected[x] != counts[x])
    what = "is left out" if expected[place] > counts[place] else "comes more often than it was given"
    return f"document {document} of epoch {epoch} {what} from token {start} on"


def _tokens(pieces: Iterable[Piece]) -> int:
    return sum(piece.tokens for piece in pieces)


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
