"""Iterations planned ahead of training, so that a step never waits for a plan: by a thread, or by a process whose plans
a thread takes: that leaves the interpreter to the thread that launches kernels.

The order of plans is the planner's alone; the thread only runs early. Each planned iteration carries the
planner's state after it, so that a checkpoint saves the state of what was trained, not of what was prefetched.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from wlb_megatron.child import Child
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.packer import packed_waiting
from wlb_megatron.packing.planner import Planner
from wlb_megatron.pipeline.kept_layers import Load, joined_loads, loads_of
from wlb_megatron.pipeline.orders import groups, joined_groups, links_of
from wlb_megatron.plan import IterationPlan, MicroBatch, Piece, PlanSummary, Summariser
from wlb_megatron.sharding.cut import cut, pad
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.workload.kernel_table import KernelTable


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks [start, start + size) of a stage's data x context parallel ones, which share a micro-batch.

    source: the planner that made the plan (dynamic.plan_step.Outcome). gain: predicted time with fixed groups over this
    plan's.
    """

    start: int
    size: int
    source: str
    gain: float


@dataclass(frozen=True, slots=True)
class PlannedMicroBatch:
    """One item of the sampler. `pieces` and `shard` include the padding piece, if there is one.

    group: the ranks that share it; None: Megatron's context-parallel group. predictions: numbers for the whole
    iteration, see documents.blend; empty if nothing asks for them. steps: micro-batches of the iteration on every
    rank, which need not be as many as Megatron counts. chunk_groups: sizes of the groups that this rank's micro-batches
    form (pipeline/orders.py); empty if no document is in chunks. loads: tokens and documents of all micro-batches of
    the iteration, by which layers are kept; empty if steps run the flags of recomputation.
    """

    iteration: int
    index: int
    pieces: tuple[Piece, ...]
    shard: ShardPlan
    summary: PlanSummary
    plan_seconds: float
    group: RankGroup | None = None
    predictions: tuple[int, ...] = ()
    steps: int = 1
    chunk_groups: tuple[int, ...] = ()
    loads: tuple[Load, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedIteration:
    """One data-parallel rank's micro-batches, the planner's state after them, and a digest of all plans so far.

    state: makes the JSON-able state when called. stream: the document stream's part of it. samples: micro-batches by
    Megatron's count of all iterations so far. trained: their tokens. put_back: pieces so far that arrived an iteration
    later, as their bound on delay could not be promised. above_spread: iterations so far with more tokens than
    --wlb-batch-spread. predicted_ms: the whole iteration's time. arrival_ms: its documents' time in arrival order.
    plan: all data-parallel ranks' plan. These three are None if they are not known.
    """

    micro_batches: tuple[PlannedMicroBatch, ...]
    state: Callable[[], dict[str, Any]]
    digest: bytes
    stream: dict[str, Any] = field(default_factory=dict)
    samples: int = 0
    trained: int = 0
    put_back: int = 0
    above_spread: int = 0
    predicted_ms: float | None = None
    plan: IterationPlan | None = None
    arrival_ms: float | None = None


def nothing_counted(_: Sequence[Piece]) -> tuple[int, ...]:
    """No predictions: nothing is scaled by them."""
    return ()


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """How a data-parallel rank's micro-batches are padded and cut. All of it can be sent to another process.

    predict: milliseconds of an iteration from its plan and shard plans, if this process reports them. arrival_order:
    begins the same prediction in arrival order, of consecutive plans (prediction.in_arrival_order). predictions: counts
    an iteration's predictions from its pieces, if losses are scaled by them. in_step: data-parallel ranks meet in every
    forward and backward (experts, FSDP): all must run the same order. keeps_layers: each step plans what it recomputes.
    """

    dp_rank: int
    cp_size: int
    alignment: int
    sharding: str
    table: KernelTable
    predict: Callable[[IterationPlan, Sequence[ShardPlan]], float | None] | None = None
    arrival_order: Callable[[Planner], Callable[[IterationPlan], float | None] | None] | None = None
    predictions: Callable[[Sequence[Piece]], tuple[int, ...]] = nothing_counted
    in_step: bool = False
    keeps_layers: bool = False


@dataclass(frozen=True, slots=True)
class RankPlan:
    """A data-parallel rank's part of an iteration. groups: more that its ranks must agree on, for the digest."""

    micro_batches: tuple[PlannedMicroBatch, ...]
    predicted_ms: float | None
    groups: bytes = b""


CutPlan = Callable[[IterationPlan, PlanSummary, float], RankPlan | None]
"""This rank's part of a plan, which was begun at that time (perf_counter). None where no more are wanted."""


def plan_iterations(planner: Planner, settings: ShardSettings) -> Iterator[PlannedIteration]:
    """Planned iterations one after another, until the planner's stream ends."""
    return iterations_of(planner, settings, partial(cut_plan, settings), settings.table.to_json())


def iterations_of(
    planner: Planner, settings: ShardSettings, cut_plan: CutPlan, tables: str
) -> Iterator[PlannedIteration]:
    """The same, cut over ranks by `cut_plan`, with the state of the planner after each.

    tables: kernel tables. Ranks that have others would cut alike micro-batches differently.
    """
    summariser = Summariser(packed_waiting(planner.packer.state()))
    digest = hashlib.blake2b(tables.encode(), digest_size=8)
    in_arrival_order = None if settings.arrival_order is None else settings.arrival_order(planner)
    while True:
        start = time.perf_counter()
        plan = planner.next_iteration()
        of_rank = None if plan is None else cut_plan(plan, summariser.summarise(plan), start)
        if plan is None or of_rank is None:
            return
        update_digest(digest, plan)
        digest.update(of_rank.groups)
        yield PlannedIteration(
            of_rank.micro_batches,
            planner.snapshot(),
            digest.digest(),
            planner.stream.state(),
            planner.samples,
            planner.trained,
            planner.put_back,
            planner.above_spread,
            of_rank.predicted_ms,
            plan,
            None if in_arrival_order is None else in_arrival_order(plan),
        )


def cut_plan(settings: ShardSettings, plan: IterationPlan, summary: PlanSummary, start: float) -> RankPlan:
    """This rank's micro-batches, padded and cut over context-parallel ranks. With an alignment of 4, pieces of 5 and 8
    tokens get a padding piece of 3."""
    padded = [pad(row[settings.dp_rank].pieces, settings.alignment) for row in plan.micro_batches]
    lengths = [np.array([p.end - p.start for p in pieces], dtype=np.int64) for pieces in padded]
    shards = cut(lengths, settings.cp_size, settings.sharding, settings.table, links_of(padded))
    counts = settings.predictions(
        [piece for row in plan.micro_batches for micro_batch in row for piece in micro_batch.pieces]
    )
    seconds = time.perf_counter() - start
    together, loads = chunk_groups(plan, settings), layer_loads(plan, settings)
    micro_batches = tuple(
        PlannedMicroBatch(
            plan.iteration,
            index,
            pieces,
            shard_plan,
            summary,
            seconds,
            predictions=counts,
            steps=len(padded),
            chunk_groups=together,
            loads=loads,
        )
        for index, (pieces, shard_plan) in enumerate(zip(padded, shards, strict=True))
    )
    return RankPlan(micro_batches, None if settings.predict is None else settings.predict(plan, shards))


def chunk_groups(plan: IterationPlan, settings: ShardSettings) -> tuple[int, ...]:
    """Sizes of the groups of this rank's micro-batches, empty if all are 1."""
    ranks = [[micro_batch.pieces for micro_batch in column] for column in _meeting_ranks(plan, settings)]
    sizes = joined_groups([groups(column) for column in ranks])
    return sizes if max(sizes) > 1 else ()


def layer_loads(plan: IterationPlan, settings: ShardSettings) -> tuple[Load, ...]:
    """What this rank's micro-batches hold, or the largest of all ranks that must keep the same layers."""
    if not settings.keeps_layers:
        return ()
    columns = _meeting_ranks(plan, settings)
    return tuple(joined_loads([loads_of(column, settings.alignment, settings.cp_size) for column in columns]))


def _meeting_ranks(plan: IterationPlan, settings: ShardSettings) -> list[tuple[MicroBatch, ...]]:
    """Micro-batches of each data-parallel rank that must run the same order, or of this one alone."""
    columns = list(zip(*plan.micro_batches, strict=True))
    return columns if settings.in_step else [columns[settings.dp_rank]]


def update_digest(digest: Any, plan: IterationPlan) -> None:
    """Add every piece of every data-parallel rank, in order, with where each micro-batch ends."""
    for row in plan.micro_batches:
        for micro_batch in row:
            # Much faster than an array of tuples.
            numbers = chain(chain.from_iterable(micro_batch.pieces), (plan.iteration, -2, 0, 0, 0))
            digest.update(np.fromiter(numbers, dtype=np.int64, count=5 * len(micro_batch.pieces) + 5))


class PlanAhead:
    """Runs an iterator of plans `depth` items early in a daemon thread. An exception there is raised here."""

    def __init__(self, make: Callable[[], Iterator[PlannedIteration]], depth: int) -> None:
        self._make = make
        self._waited = 0.0
        self._asked: float | None = None  # since when training waits
        self._got = time.perf_counter()
        self._steps: deque[float] = deque(maxlen=5)
        self._made: queue.Queue[PlannedIteration | BaseException | None] = queue.Queue(depth)
        self._thread: threading.Thread | None = None
        self.closing = False

    def _run(self) -> None:
        try:
            for iteration in self._make():
                self._made.put(iteration)
            self._made.put(None)
        except BaseException as error:
            self._made.put(error)

    def __iter__(self) -> Iterator[PlannedIteration]:
        # Started here, at the first item asked for: by then the loader has forked its workers.
        self._thread = threading.Thread(target=self._run, name="wlb-planning", daemon=True)
        self._thread.start()
        while (iteration := self._get()) is not None:
            if isinstance(iteration, BaseException):
                raise iteration
            yield iteration

    def _get(self) -> PlannedIteration | BaseException | None:
        self._asked = time.perf_counter()
        self._steps.append(self._asked - self._got)
        iteration = self._made.get()
        self._got = time.perf_counter()
        self._waited += self._got - self._asked
        self._asked = None
        return iteration

    def close(self) -> None:
        """End the thread, where the iterator looks at `closing`: one that waits in a collective must not outlive
        the interpreter. What it still makes is dropped. After an exception the sender may never send: the job should
        hear of it soon."""
        self.closing = True
        patience = time.monotonic() + (2.0 if hasattr(sys, "last_value") else 60.0)
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < patience:
            with contextlib.suppress(queue.Empty):
                self._made.get(timeout=0.02)

    @property
    def pace(self) -> float | None:
        """Seconds from one plan's use to the next one's, the median of the last few; None before there are any."""
        steps = sorted(self._steps)
        return steps[len(steps) // 2] if len(steps) == self._steps.maxlen else None

    @property
    def waiting(self) -> float:
        """Seconds that training has been waiting for a plan by now; 0 if it is not."""
        asked_at = self._asked
        return 0.0 if asked_at is None else time.perf_counter() - asked_at

    def take_waited(self) -> float:
        """Seconds that training has waited for plans since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited


LEAST_DOCUMENTS = 1000
"""Documents of an iteration from which a process plans. Fewer are planned in some 15 ms, which a step does not feel."""


def in_a_process(planner: Planner, config: WlbConfig, mean_length: float) -> bool:
    """Whether a process plans. mean_length: tokens of a piece.

    Not with dynamic groups, whose ranks talk to each other as they plan.
    """
    if config.cp_mode == "dynamic" or config.plan_process == "never":
        return False
    return config.plan_process == "always" or planner.global_tokens / mean_length >= LEAST_DOCUMENTS


def plan_in_a_process(
    planner: Planner, settings: ShardSettings, *, keeps_plans: bool = False
) -> Iterator[PlannedIteration]:
    """What `plan_iterations` gives, made by a child; this process's planner stays as it is. The child gets the planner
    as it stands, and sends iterations as fast as the pipe takes them. They are taken a micro-batch at a time, so that
    no call holds the interpreter for long.

    keeps_plans: iterations come with the plan of all data-parallel ranks. Raises what planning raises, and WlbError if
    no child can be started or it ends before the plans do: after those that it has sent, often hundreds.
    """
    try:
        child = Child(partial(_planned_parts, planner, settings, keeps_plans))
    except OSError as error:
        raise WlbError(
            f"no process can be started to plan iterations ({error}): set --wlb-plan-process never"
        ) from None
    atexit.register(child.kill)
    answers = iter(child.receive, None)
    try:
        for iteration, count in answers:
            yield replace(iteration, micro_batches=tuple(islice(answers, count)))
    except OSError as error:
        raise WlbError(
            f"the process that plans iterations does not answer ({error}): see whether the node ran out of memory, and "
            "start again from the last checkpoint"
        ) from None
    except RuntimeError as error:
        raise RuntimeError(f"wlb_megatron: planning failed\n{error}") from None
    finally:
        child.kill()
        atexit.unregister(child.kill)


def _planned_parts(
    planner: Planner, settings: ShardSettings, keeps_plans: bool, _: Iterator[Any]
) -> Iterator[tuple[PlannedIteration, int] | PlannedMicroBatch]:
    """The child's work: each iteration with the number of its micro-batches, which follow one by one."""
    for iteration in plan_iterations(planner, settings):
        state = partial(json.loads, json.dumps(iteration.state()))
        plan = iteration.plan if keeps_plans else None
        yield replace(iteration, micro_batches=(), state=state, plan=plan), len(iteration.micro_batches)
        yield from iteration.micro_batches
