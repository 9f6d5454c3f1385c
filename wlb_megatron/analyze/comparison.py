"""Simulates the same documents packed as Megatron would, as set, and in parts, and picks the best settings."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from wlb_megatron.analyze.measure import Measured, measure
from wlb_megatron.analyze.search import (
    Candidate,
    Found,
    Outcome,
    Searched,
    outcome_of,
    ranked,
    search,
    side_by_side,
)
from wlb_megatron.arguments import flags_of
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Lengths
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.carry import weighs_equally
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.factory import arrival_order
from wlb_megatron.packing.limits import MARGIN, GpuMemory
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker
from wlb_megatron.report.terminal import progress
from wlb_megatron.sharding.cut import shard_all
from wlb_megatron.simulator.iteration import Simulated, perfectly_balanced, simulate
from wlb_megatron.simulator.job import Job, Run
from wlb_megatron.workload.memory import GIB, LEAST, memory_needed

NOISE = 0.01
"""Settings are recommended over arrival order, and other settings over the user's, only if they gain more than this
share in tokens/s; less is noise."""

STEADY = 1.05
"""Steps are steady if the slowest takes at most this many times as long as arrival order's slowest."""

STEADIER, SPEED_SHARE = 0.95, 0.9
"""Other settings are steadier if their slowest step takes at most the first share of the time, and they keep at least
the second of the tokens/s."""

EVEN = "1.25"
"""A --wlb-batch-spread below the default, tried where whole documents wait."""


@dataclass(frozen=True)
class Gain:
    """The gain of a part, or of other settings, over arrival order. slowest: slowest step over arrival order's.
    fullest: tokens of the fullest step over the mean's. alone: gain of a part by itself; None: no part. `outcome`
    is of these settings."""

    name: str
    config: WlbConfig
    alone: float | None
    by_token: float
    equal_work: float
    slowest: float
    fullest: float = 1.0
    outcome: Outcome | None = None


def _fullest(simulated: Simulated) -> float:
    return float(simulated.tokens.max() / simulated.tokens.mean())


class Choice(NamedTuple):
    """Flags to train with, their speed by token and their slowest step, both over arrival order's."""

    flags: str
    by_token: float
    slowest: float


class Fits(NamedTuple):
    """What fits the GPU: tokens of the longest micro-batch and of the longest window; 0: not even the smallest.

    in_chunks: with documents in chunks, else with whole ones, which need 1.25 windows.
    """

    micro_batch: int
    window: int
    gib: float
    in_chunks: bool


MOST = 1 << 26
"""The longest micro-batch or window that `fits` looks at (tokens)."""


def fits(memory: GpuMemory, *, in_chunks: bool) -> Fits:
    """What fits this memory, counted as training counts it."""
    room, gib = int(memory.size * (1 - MARGIN)), memory.size / GIB
    if in_chunks:
        plain = WlbConfig()
        window = _most(1024, lambda w: replace(memory, window=w).needed(plain, w)[0] <= room)
        return Fits(memory.in_chunks(), window, gib, True)
    limit = _most(memory.alignment, lambda tokens: memory_needed(memory.shape, memory.layout, tokens) <= room)
    return Fits(limit, limit * LEAST[1] // LEAST[0] // 1024 * 1024, gib, False)


def _most(step: int, fit: Callable[[int], bool]) -> int:
    """The largest multiple of `step` that fits, if the need grows with it."""
    return bisect_left(range(step, MOST + 1, step), True, key=lambda tokens: not fit(tokens)) * step


@dataclass(frozen=True)
class Analysis:
    """Before (arrival order, per-sequence sharding) and after (the given settings), with the settings that were
    derived.

    * gains: of the parts, each with all before it, and of other settings.
    * unmasked: nanoseconds per token of windows whose documents attend to each other, as Megatron trains without
      document masks.
    * balanced: the same of a perfectly balanced plan of the documents as set.
    * assumed: no model was given, so the figures are a known one's.
    * equal_weights: whether a token weighs the same in every step of the settings, see packing/carry.py.
    * fullest: bytes of the fullest GPU as set, and of its weights and their states; None: not estimated.
    * weights_problem: a line if the weights alone do not fit a GPU. Nothing is then recommended.
    * searched: other settings of the schedule or the layout.
    """

    lengths: Lengths
    config: WlbConfig
    job: Job
    capacity: int
    thresholds: list[int]
    equal_weights: bool
    before: Measured
    after: Measured
    messages: tuple[str, ...]
    gains: tuple[Gain, ...]
    unmasked: float
    balanced: float
    memory: Fits
    fullest: tuple[int, int] | None
    weights_problem: str | None
    assumed: bool = False
    searched: Searched | None = None

    @property
    def measured(self) -> list[tuple[str, Measured]]:
        name = f"{self.config.packing}, {self.config.sharding}"
        return [("original, per-sequence", self.before), (name, self.after)]

    @property
    def speedup(self) -> float:
        """Predicted time per trained token, before over after."""
        return self.before.simulated.ns_per_token / self.after.simulated.ns_per_token

    @property
    def equal_work_speedup(self) -> float:
        """The same per unit of the documents' work: arrival order cuts documents, and cut ones need less attention."""
        return self.speedup * self.after.work_per_token / self.before.work_per_token

    @property
    def over_unmasked(self) -> float:
        """Time per trained token of Megatron without a mask, over the given settings'."""
        return self.unmasked / self.after.simulated.ns_per_token

    @property
    def bound(self) -> float:
        """Speed-up by token of a perfectly balanced plan."""
        return self.before.simulated.ns_per_token / self.balanced

    @property
    def _alike(self) -> list[Gain]:
        """Documents above the window that are to train whole are not split for speed."""
        return [gain for gain in self.gains if gain.config.overlong == self.config.overlong]

    @property
    def _as_set(self) -> Gain:
        slowest = float(self.after.simulated.steps.max() / self.before.simulated.steps.max())
        fullest = _fullest(self.after.simulated)
        return Gain("as set", self.config, None, self.speedup, self.equal_work_speedup, slowest, fullest)

    @property
    def best(self) -> Gain:
        """The settings to use: those given, unless others are faster by more than noise and their slowest step is no
        slower.

        Arrival order, if nothing tried is faster than it by more than noise.
        """
        as_set = self._as_set
        plain = Gain("arrival order", arrival_order(self.config), None, 1.0, 1.0, 1.0)
        if self.speedup < 1 + NOISE:
            worth = [gain for gain in self._alike if gain.by_token >= 1 + NOISE]
            return max(worth, key=lambda gain: gain.by_token, default=plain)
        enough = self.speedup * (1 + NOISE)
        gains = [gain for gain in self._alike if gain.by_token > enough and gain.slowest <= as_set.slowest]
        return max(gains, key=lambda gain: gain.by_token, default=as_set)

    @property
    def fits(self) -> bool:
        """Whether the job fits a GPU, with its Lmax or a lower one. True if memory is not estimated."""
        memory, job = self.memory, self.job
        if self.fullest is None or (memory.window >= job.joined_window and memory.micro_batch):
            return True
        return memory.micro_batch >= self.capacity and self.fullest[0] <= job.gpu.room

    @property
    def found(self) -> Found | None:
        """The search's first, if it is faster than the job as set by more than noise, or that does not fit. Settings
        that are `best` are among the search's."""
        if self.searched is None or not self.searched.best:
            return None
        first = self.searched.best[0]
        enough = (1 + NOISE) * 1e9 / self.after.simulated.ns_per_token
        return first if first.tokens_per_second > enough or not self.fits else None

    @property
    def recommended(self) -> Choice:
        return self._choice(self.best if self.found is None else self.found)

    @property
    def steadier(self) -> Choice | None:
        """Of all settings that were tried and beat arrival order, those with the shortest slowest step, if they are
        steadier than the recommended ones."""
        now = self.recommended
        finds = () if self.searched is None else self.searched.best
        floor = max(1 + NOISE, SPEED_SHARE * now.by_token)
        choices = [*map(self._choice, (*self._alike, self._as_set)), *map(self._choice, finds)]
        steadier = [one for one in choices if one.by_token >= floor and one.slowest <= STEADIER * now.slowest]
        return min(steadier, key=lambda one: (one.slowest, -one.by_token), default=None)

    def _choice(self, one: Gain | Found) -> Choice:
        arrival = self.before.simulated
        if isinstance(one, Gain):
            return Choice(flags_of(one.config), one.by_token, one.slowest)
        by_token = one.tokens_per_second * arrival.ns_per_token / 1e9
        return Choice(one.flags, by_token, one.slowest * 1e6 / float(arrival.steps.max()))


def analyze(
    lengths: Lengths, config: WlbConfig, job: Job, *, split: bool = True, kind: str = "none"
) -> Analysis:
    """Plan and simulate all settings over the same endless stream, with progress on stderr.

    lengths: integers[n], tokens of each document. split: also what each part gains. kind: "none", "schedule" or
    "layout", the search. WlbError on settings that cannot work.
    """
    request, plain = Candidate(job, config), arrival_order(config)
    in_chunks, uncut = (replace(config, chunks=chunks) for chunks in ("on", "off"))
    with side_by_side((lengths, request)) as submit:
        runs = _Runs(lengths, job, submit)
        settings = variants(config, job) if split else []
        runs.begin(settings, unless=(config, in_chunks, uncut))
        with progress(2 * (job.warm_up + job.iterations)) as tick:
            after, before = (runs.of(one, lambda: tick("planning")) for one in (config, plain))
        packer = after.planner.packer
        chunked, weights = isinstance(packer, ChunkPacker), job.weights_problem()
        runs.same(in_chunks if chunked else uncut, after)
        runs.begin(settings)
        searches = kind != "none" and weights is None and config.cp_mode == "fixed"
        first = outcome_of(job, before)
        analysis = Analysis(
            lengths=lengths,
            config=config,
            job=job,
            capacity=packer.max_tokens,
            thresholds=list(packer.thresholds) if isinstance(packer, VarlenPacker) else [],
            equal_weights=weighs_equally(config, packer),
            before=measure(job, before),
            after=measure(job, after),
            messages=(*after.messages, *_faster_experts(job, after)),
            unmasked=_unmasked(job),
            balanced=perfectly_balanced(after.timed_plans, job.model, after.recomputed).ns_per_token,
            memory=fits(job.gpu, in_chunks=chunked),
            fullest=job.fullest(after),
            weights_problem=weights,
            searched=search(request, after, kind, submit) if searches else None,
            gains=_gains(settings, runs, first),  # after the search, beside which they go on
        )
    if analysis.searched is None:
        return analysis
    gain = analysis.best
    rival = first if gain.config == plain else gain.outcome
    return replace(analysis, searched=ranked(analysis.searched, request, gain.config, rival))


Variants = Sequence[tuple[str, Sequence[WlbConfig]]]


def variants(config: WlbConfig, job: Job) -> Variants:
    """The settings whose gains are told.

    First the parts that these settings leave open, in the order in which they are added: of each the settings with all
    parts before it, and with it and what it needs alone. Then other settings, which may be better.
    """
    plain, layout = arrival_order(config), job.model.layout
    sharding = "adaptive" if config.sharding == "per-sequence" else config.sharding
    waits = config.max_delay != 0 and config.thresholds != "none"  # unless documents train in chunks
    settings: list[tuple[str, list[WlbConfig]]] = []

    def add(name: str, alone: WlbConfig, together: WlbConfig | None = None) -> None:
        settings.append((name, [replace(together or alone, sharding=sharding), alone]))

    if layout.context > 1:
        add("sharding of each document", replace(plain, sharding=sharding))
    if config.fixed_windows:
        add("packing in fixed windows", replace(config, sharding="per-sequence"))
        return settings
    base, number = replace(plain, packing="varlen"), config.micro_batches_per_window
    if layout.pipeline == 1:  # one micro-batch a window, no chunks: nothing that needs a flag
        base = replace(base, micro_batches_per_window=number, chunks=config.chunks)
    undelayed = replace(base, max_delay=0, thresholds="none")
    add("packing of whole documents", undelayed)
    if waits:
        add("delay of long documents", base)
    if layout.pipeline > 1 and number != "1":
        undelayed = replace(undelayed, micro_batches_per_window=number)
        delayed = replace(undelayed, max_delay=config.max_delay, thresholds=config.thresholds)
        add("number of micro-batches", undelayed, delayed if waits else undelayed)
        if config.chunks != "off" and not job.no_chunks(config):
            chunks = replace(base, micro_batches_per_window=number, chunks="on", overlong=config.overlong)
            # With chunks nothing waits, and flags that say how long are refused.
            add("long documents in chunks", replace(chunks, max_delay=None, thresholds="auto"))
    if config.cp_mode != "dynamic":
        unchunked = config.chunks == "off" or layout.pipeline == 1
        if unchunked and config.batch_spread == "auto" and waits:
            settings.append((f"steps of at most {EVEN} batches", [replace(config, batch_spread=EVEN)]))
    return settings


def _plans(config: WlbConfig) -> WlbConfig:
    """Settings with the same plans, which are sharded otherwise. Dynamic groups shard by themselves."""
    return config if config.cp_mode == "dynamic" else replace(config, sharding="per-sequence")


class _Runs:
    """Runs of settings here, and outcomes of others in processes beside this one. Settings with the same plans are
    planned once."""

    def __init__(self, lengths: Lengths, job: Job, submit: Callable[..., Any]) -> None:
        self._lengths, self._job, self._submit = lengths, job, submit
        self._done: dict[WlbConfig, Run] = {}
        self._begun: dict[WlbConfig, Future[dict[WlbConfig, Outcome]]] = {}

    def begin(self, settings: Variants, unless: Sequence[WlbConfig] = ()) -> None:
        """Begins those whose plans are not known here. unless: those that are to be planned here."""
        plans = {*map(_plans, (*self._done, *unless))}
        for _, pair in settings:
            if todo := [one for one in pair if _plans(one) not in plans and one not in self._begun]:
                self._begun |= dict.fromkeys(todo, self._submit(_outcomes, todo))

    def of(self, config: WlbConfig, tick: Callable[[], None] = lambda: None) -> Run:
        """tick: called after each iteration that is planned here."""
        if config not in self._done:
            planned = (run for one, run in self._done.items() if _plans(one) == _plans(config))
            if (run := next(planned, None)) is not None:
                self._done[config] = self._job.cut(run, config)
            else:
                self._done[config] = self._job.run(self._lengths, config, tick)
        return self._done[config]

    def outcome(self, config: WlbConfig) -> Outcome:
        if config not in self._begun:
            return outcome_of(self._job, self.of(config))
        return self._begun[config].result()[config]

    def same(self, config: WlbConfig, run: Run) -> None:
        """Takes this run for the settings, which have the same plans."""
        self._done.setdefault(config, run)


def _outcomes(shared: tuple[Lengths, Candidate], settings: list[WlbConfig]) -> dict[WlbConfig, Outcome]:
    lengths, request = shared
    runs = _Runs(lengths, request.job, _outcomes)
    return {config: runs.outcome(config) for config in settings}


def _gains(settings: Variants, runs: _Runs, first: Outcome) -> tuple[Gain, ...]:
    def gain(name: str, together: WlbConfig, *part: WlbConfig) -> Gain:
        outcome, before = runs.outcome(together), first.times
        by_token = before.ns_per_token / outcome.times.ns_per_token
        return Gain(
            name,
            together,
            before.ns_per_token / runs.outcome(*part).times.ns_per_token if part else None,
            by_token,
            by_token * outcome.work / first.work,
            float(outcome.times.steps.max() / before.steps.max()),
            _fullest(outcome.times),
            outcome,
        )

    gains = []
    with progress(len(settings)) as tick:
        for name, pair in settings:
            # Whole documents may not fit a memory that chunks fit; what is asked for has been planned before this.
            with suppress(WlbError):
                gains.append(gain(name, *pair))
            tick("parts")
    return tuple(gains)


def _faster_experts(job: Job, run: Run) -> list[str]:
    """A line on the settings with which experts train faster, where they are not set and gain."""
    model, shards = job.model, run.shards
    experts = model.shape.experts
    hopper = re.search("H[12]00", model.measured.device) is not None
    settings = experts.faster_settings(hopper) if experts else ""
    if experts is None or not settings or model.costs is not None or shards is None:
        return []
    better = replace(experts, one_kernel=hopper or experts.one_kernel, fused_permutation=True)
    faster_model = replace(model, shape=replace(model.shape, experts=better))
    orders = job.times(run.config).orders(run.timed_plans)
    faster = simulate(shards, faster_model, orders=orders, recomputed=run.recomputed)
    gain = run.simulated.ns_per_token / faster.ns_per_token
    return [f"set {settings}: predicted to be {gain:.2f} times as fast"] if gain >= 1 + NOISE else []


def _unmasked(job: Job) -> float:
    """Nanoseconds per token of full windows, each attended as one sequence, sharded as Megatron does."""
    layout = job.model.layout
    windows = np.full(job.micro_batch_size, job.window, dtype=np.int64)
    (shard,) = shard_all([windows], layout.context, "per-sequence", job.model.table)
    count = job.micro_batches // job.micro_batch_size
    return simulate([[[shard] * layout.data] * count], job.model).ns_per_token
