"""Simulates the same documents packed as Megatron would, as set, and in parts, and picks the best settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wlb_megatron.analyze.fits import Fits, Recomputed, by_recomputation, fits
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
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Lengths
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.carry import weighs_equally
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.factory import arrival_order
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker
from wlb_megatron.sharding.cut import shard_all
from wlb_megatron.simulator.iteration import Simulated, perfectly_balanced, simulate
from wlb_megatron.simulator.job import Job, Run

NOISE = 0.01
"""Settings are recommended over arrival order, and other settings over the user's, only if they gain more than this
share in tokens/s; less is noise."""

STEADY = 1.05
"""Steps are steady if the slowest takes at most this many times as long as arrival order's slowest, and the fullest
has at most this many times the mean's tokens."""

STEADIER = 0.95
"""Other settings are steadier if what is above STEADY falls to this share in sum, and neither rises."""

KEPT = 0.9
"""Steadier settings are named if they keep at least this share of the tokens/s."""

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

    @property
    def uneven(self) -> tuple[float, float]:
        """Slowest and fullest step, STEADY where they are below it."""
        return max(self.slowest, STEADY), max(self.fullest, STEADY)


def _fullest(simulated: Simulated) -> float:
    return float(simulated.tokens.max() / simulated.tokens.mean())


@dataclass(frozen=True)
class Trade:
    """The choice between documents in chunks and whole, where whole steps are not alike: of each, the speed-up by
    token, the slowest step (ms), and the tokens of the fullest step over the mean."""

    chosen: tuple[float, float, float]
    other: tuple[float, float, float]
    flag: str


@dataclass(frozen=True)
class Analysis:
    """Before (arrival order, per-sequence sharding) and after (the given settings), with the settings that were
    derived.

    * gains: of the parts, each with all before it, and of other settings.
    * trade: what the other choice of chunks would bring, where `auto` did not take the faster one by token.
    * unmasked: nanoseconds per token of windows whose documents attend to each other, as Megatron trains without
      document masks.
    * balanced: the same of a perfectly balanced plan of the documents as set.
    * assumed: no model was given, so the figures are a known one's.
    * equal_weights: whether a token weighs the same in every step of the settings, see packing/carry.py.
    * fullest: bytes of the fullest GPU as set, and of its weights and their states; None: not estimated.
    * weights_problem: a line if the weights alone do not fit a GPU. Nothing is then recommended.
    * runs: of before and after. recomputed: their speeds by kind of recomputation.
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
    trade: Trade | None
    unmasked: float
    balanced: float
    memory: Fits
    fullest: tuple[int, int] | None
    weights_problem: str | None
    runs: tuple[Run, Run]
    assumed: bool = False
    recomputed: tuple[Recomputed | None, Recomputed | None] = (None, None)
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
    def best(self) -> Gain:
        """The settings to use: those given, unless others are faster by more than noise and their slowest step is no
        slower.

        Arrival order, if nothing tried is faster than it by more than noise.
        """
        slowest = float(self.after.simulated.steps.max() / self.before.simulated.steps.max())
        fullest = _fullest(self.after.simulated)
        as_set = Gain("as set", self.config, None, self.speedup, self.equal_work_speedup, slowest, fullest)
        plain = Gain("arrival order", arrival_order(self.config), None, 1.0, 1.0, 1.0)
        if self.speedup < 1 + NOISE:
            worth = [gain for gain in self._alike if gain.by_token >= 1 + NOISE]
            return max(worth, key=lambda gain: gain.by_token, default=plain)
        enough = self.speedup * (1 + NOISE)
        gains = [gain for gain in self._alike if gain.by_token > enough and gain.slowest <= slowest]
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
    def steadier_found(self) -> Found | None:
        """Of what the search found, and the job as given, the fastest with steady steps beside the job's that is nearly
        as fast as `found`, if that has none."""
        if self.found is None or self.searched is None or (start := self.searched.given) is None:
            return None
        steady = STEADY * start.slowest
        if self.found.slowest <= steady:
            return None
        floor = KEPT * self.found.tokens_per_second
        pool = (*self.searched.best, start)
        return next((one for one in pool if one.slowest <= steady and one.tokens_per_second >= floor), None)

    @property
    def steadier(self) -> Gain | None:
        """Settings with steadier steps that are nearly as fast and beat arrival order, if those of `best` are not
        steady.

        Of several the steadiest, of these the most gain at equal work, because some cut documents.
        """
        now, floor = self.best.uneven, max(1 + NOISE, KEPT * self.best.by_token)
        steadier = [
            gain
            for gain in self._alike
            if gain.by_token >= floor
            and sum(gain.uneven) <= STEADIER * sum(now)
            and all(map(float.__le__, gain.uneven, now))
        ]
        return min(steadier, key=lambda gain: (sum(gain.uneven), -gain.equal_work), default=None)


def analyze(
    lengths: Lengths,
    config: WlbConfig,
    job: Job,
    tick: Callable[[str], None] = lambda _: None,
    *,
    split: bool = True,
    kind: str = "none",
) -> Analysis:
    """Plan and simulate all settings over the same endless stream.

    lengths: integers[n], tokens of each document. tick: called after each planned iteration, and each other setting.
    split: also what each part gains. kind: "none", "schedule" or "layout", the search. WlbError on settings that cannot
    work.
    """
    request, plain = Candidate(job, config), arrival_order(config)
    in_chunks, uncut = (replace(config, chunks=chunks) for chunks in ("on", "off"))
    with side_by_side((lengths, request)) as submit:
        runs = _Runs(lengths, job, lambda: tick("planning"), submit)
        settings = variants(config, job) if split else []
        runs.begin(settings, unless=(config, in_chunks, uncut))
        after, before = runs.of(config), runs.of(plain)
        packer = after.planner.packer
        chunked, weights = isinstance(packer, ChunkPacker), job.weights_problem()
        runs.same(in_chunks if chunked else uncut, after)
        runs.begin(settings)
        searches = kind != "none" and weights is None and config.cp_mode == "fixed"
        first = outcome_of(job, before)
        recomputed = (
            (None, None) if weights else (by_recomputation(job, before), by_recomputation(job, after))
        )
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
            runs=(before, after),
            recomputed=recomputed,
            searched=search(request, after, kind, submit, tick) if searches else None,
            gains=_gains(settings, runs, first),  # after the search, beside which they go on
            trade=_trade(config, job, runs, first, after),
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

    def __init__(
        self, lengths: Lengths, job: Job, progress: Callable[[], None], submit: Callable[..., Any]
    ) -> None:
        self._lengths, self._job, self._progress, self._submit = lengths, job, progress, submit
        self._planned: dict[WlbConfig, Run] = {}
        self._done: dict[WlbConfig, Run] = {}
        self._begun: dict[WlbConfig, Future[dict[WlbConfig, Outcome]]] = {}

    def begin(self, settings: Variants, unless: Sequence[WlbConfig] = ()) -> None:
        """Begins those whose plans are not known here. unless: those that are to be planned here."""
        plans = {*self._planned, *map(_plans, unless)}
        for _, pair in settings:
            if todo := [one for one in pair if _plans(one) not in plans and one not in self._begun]:
                self._begun |= dict.fromkeys(todo, self._submit(_outcomes, todo))

    def of(self, config: WlbConfig) -> Run:
        if config not in self._done:
            plans = _plans(config)
            if plans in self._planned:
                self._done[config] = self._job.cut(self._planned[plans], config)
            else:
                run = self._job.run(self._lengths, config, self._progress)
                self._done[config] = self._planned[plans] = run
        return self._done[config]

    def outcome(self, config: WlbConfig) -> Outcome:
        if config not in self._begun:
            return outcome_of(self._job, self.of(config))
        outcomes = self._begun[config].result()
        self._progress()
        return outcomes[config]

    def same(self, config: WlbConfig, run: Run) -> None:
        """Takes this run for the settings, which have the same plans."""
        self._done.setdefault(config, run)
        self._planned.setdefault(_plans(config), run)


def _outcomes(shared: tuple[Lengths, Candidate], settings: list[WlbConfig]) -> dict[WlbConfig, Outcome]:
    lengths, request = shared
    runs = _Runs(lengths, request.job, lambda: None, _outcomes)
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
    for name, pair in settings:
        # Whole documents may not fit a memory that chunks fit; what is asked for has been planned before this.
        with suppress(WlbError):
            gains.append(gain(name, *pair))
    return tuple(gains)


def _trade(config: WlbConfig, job: Job, runs: _Runs, first: Outcome, after: Run) -> Trade | None:
    """None where `auto` had no choice, or took the faster one."""
    fixed = config.chunks == "auto" and not config.fixed_windows and config.cp_mode == "fixed"
    chunked = isinstance(after.planner.packer, ChunkPacker)
    if (
        not fixed
        or job.model.layout.pipeline == 1
        or (not chunked and (config.max_delay or job.no_chunks(config)))
    ):
        return None
    overlong = config.overlong.replace("chunk", "split")
    opposite = replace(config, chunks="off" if chunked else "on", overlong=overlong)
    try:
        other = runs.outcome(opposite)
    except WlbError:
        return None

    def figures(times: Simulated) -> tuple[float, float, float]:
        speed = first.times.ns_per_token / times.ns_per_token
        return speed, float(times.steps.max()) / 1e6, _fullest(times)

    choice, rival, flag = figures(after.simulated), figures(other.times), f"--wlb-chunks {opposite.chunks}"
    return Trade(choice, rival, flag) if rival[0] > choice[0] * (1 + NOISE) else None


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
    faster = simulate(shards, faster_model, orders=job.orders(run.timed_plans), recomputed=run.recomputed)
    gain = run.simulated.ns_per_token / faster.ns_per_token
    return [f"set {settings}: predicted to be {gain:.2f} times as fast"] if gain >= 1 + NOISE else []


def _unmasked(job: Job) -> float:
    """Nanoseconds per token of full windows, each attended as one sequence, sharded as Megatron does."""
    layout = job.model.layout
    windows = np.full(job.micro_batch_size, job.window, dtype=np.int64)
    (shard,) = shard_all([windows], layout.context, "per-sequence", job.model.table)
    count = job.micro_batches // job.micro_batch_size
    return simulate([[[shard] * layout.data] * count], job.model).ns_per_token
