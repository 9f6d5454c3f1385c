"""Finds the settings that train most tokens a second, on the same model, documents and GPUs: few iterations of many
settings, then more of the best."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wlb_megatron.analyze.measure import waiting
from wlb_megatron.arguments import flags_of
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Lengths
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.limits import lmax as usual_lmax
from wlb_megatron.report.terminal import progress
from wlb_megatron.simulator.iteration import Simulated
from wlb_megatron.simulator.job import DEFAULT_GIB, Job, Run
from wlb_megatron.simulator.model_flags import check_divisible
from wlb_megatron.workload.model import Layout

SHOWN = 5
QUICK = (4, 2)
"""Iterations and warm-up of a first look."""

MOST_PLANNED, LEAST = 20_000, 16
"""The best are simulated over as many iterations as the job, or as many as hold about MOST_PLANNED documents, but over
at least LEAST."""

FINALISTS = 6
LAYOUTS_KEPT = 3
"""Layouts whose schedules are searched."""

CHUNKS_GAIN = 1.4
"""A layout is not tried in chunks if whole documents are slower than another layout's by more than this factor. In a
first look chunks gained at most 1.1 on the 74 layouts of 512 GPUs (70B, window 128K), and 1.35 on 64 GPUs (7B)."""

SAMPLE = 1 << 16
"""Documents of each corpus that a first look draws from: a large index is not hashed for each setting."""

VIRTUAL = (1, 2, 3, 4, 6, 8)
"""Model chunks of a stage that are tried, where they divide its layers."""

PER_WINDOW = ("auto", "1", "2", "4")
"""Micro-batches for each window."""


@dataclass(frozen=True)
class Candidate:
    """A job and its settings."""

    job: Job
    config: WlbConfig


@dataclass(frozen=True)
class Outcome:
    """What remains of a run without its plans: its times, its work for each token, and Job.fullest."""

    times: Simulated
    work: float
    memory: tuple[int, int] | None


def outcome_of(job: Job, run: Run) -> Outcome:
    rows = [row for plan in run.timed_plans for row in plan.micro_batches]
    work = sum(micro_batch.work for row in rows for micro_batch in row)
    tokens = sum(micro_batch.tokens for row in rows for micro_batch in row)
    return Outcome(run.simulated, work / tokens, job.fullest(run))


@dataclass(frozen=True)
class Found:
    """A candidate, simulated. flags: how it differs from the job as given. slowest: step (ms). memory: bytes of the
    fullest GPU. waits: shares of a step's computing. compute: GPU nanoseconds for each token. why: the difference in
    one line."""

    candidate: Candidate
    flags: str
    tokens_per_second: float
    slowest: float
    memory: int
    waits: dict[str, float]
    compute: float
    why: str = ""


@dataclass(frozen=True)
class Searched:
    """given: the job as given, None where it does not fit. best: best first. tried: settings looked at. iterations: of
    these; speeds are in proportion to that of the job as given over all its iterations. lmax: tokens of a micro-batch
    by memory, where the job as given is simulated with that and not with its own; 0: it does not fit."""

    given: Found | None
    best: tuple[Found, ...]
    tried: int
    iterations: int
    lmax: int | None = None


def search(request: Candidate, run: Run, kind: str, submit: Callable[..., Any]) -> Searched:
    """Searches from the run of the job as given, without an order. kind: "schedule" or "layout". submit: from
    `side_by_side`, of the lengths and this job."""
    job, origin = request.job, as_given(request.job, request.config)
    starts, count = [origin], 0
    documents = sum(len(plan.arrived) for plan in run.plans) // len(run.plans)

    def simulated(candidates: Iterable[Candidate], looks: tuple[int, int]) -> list[Found]:
        nonlocal count
        batch = list(candidates)
        count += len(batch)
        results = [submit(_found, _limited(one, looks, quick=looks == QUICK)) for one in batch]
        finds = []
        with progress(len(batch), lines=kind == "layout") as tick:
            for result, one in zip(results, batch, strict=True):
                if (found := result.result()) is not None:
                    finds.append(replace(found, candidate=one))
                tick("searching")
        return sorted(finds, key=lambda one: -one.tokens_per_second)

    if kind == "layout":
        likely = [_likely(layout) for layout in layouts(origin)]
        first = simulated([choices[0] for choices in likely], QUICK)  # whole, which takes half the time
        slow = {
            one.candidate.job.model.layout
            for one in first
            if one.tokens_per_second * CHUNKS_GAIN < first[0].tokens_per_second
        }
        extras = [one for choices in likely if choices[0].job.model.layout not in slow for one in choices[1:]]
        first = sorted([*first, *simulated(extras, QUICK)], key=lambda one: -one.tokens_per_second)
        by_layout: dict[Layout, Candidate] = {}
        for one in first:
            by_layout.setdefault(one.candidate.job.model.layout, one.candidate)
        starts += list(by_layout.values())[:LAYOUTS_KEPT]

    def tried_of(start: Candidate) -> list[Candidate]:
        return ([] if start == origin else [start]) + schedules(start)

    looked = simulated([each for start in starts for each in tried_of(start)], QUICK)
    extras = [each for one in looked[: FINALISTS // 2] for each in micro_batch_counts(one.candidate)]
    looked = sorted([*looked, *simulated(extras, QUICK)], key=lambda one: -one.tokens_per_second)
    iterations = min(job.iterations, max(LEAST, MOST_PLANNED // max(1, documents)))
    final = simulated(_unlike(looked, FINALISTS), (iterations, job.warm_up))
    alike = _lmax(origin) in (run.config.max_tokens, usual_lmax(run.config, job.joined_window))
    base = _found_of(outcome_of(job, run), origin, origin, iterations) if alike else None
    if not alike:
        base = next(iter(simulated([origin], (iterations, job.warm_up))), None)
    if base is not None and alike:
        scale = 1e9 / run.simulated.ns_per_token / base.tokens_per_second
        base, *final = (
            replace(one, tokens_per_second=scale * one.tokens_per_second) for one in (base, *final)
        )
    return Searched(base, tuple(final), count, iterations, None if alike else _lmax(origin))


def ranked(searched: Searched, request: Candidate, config: WlbConfig, rival: Outcome | None) -> Searched:
    """The best first. rival: the outcome of the best settings without a search, if these are not the job's."""
    finds, start, origin = list(searched.best), searched.given, as_given(request.job, request.config)
    if rival is not None:
        one = _found_of(rival, Candidate(origin.job, config), origin, searched.iterations)
        if one is not None and searched.lmax is None:
            one = replace(one, tokens_per_second=1e9 / rival.times.ns_per_token)
        finds += [] if one is None else [one]
    finds.sort(key=lambda one: -one.tokens_per_second)
    faster = [one for one in finds if start is None or one.tokens_per_second > start.tokens_per_second]
    shown = tuple(replace(one, why=_why(start, one)) for one in faster[:SHOWN])
    return replace(searched, best=shown, tried=searched.tried + (rival is not None))


def _lmax(start: Candidate) -> int | None:
    try:
        return start.job.with_lmax(start.config).max_tokens
    except WlbError:  # nothing fits
        return 0


def as_given(job: Job, config: WlbConfig) -> Candidate:
    """The job to search from: Lmax and all that is kept follow the GPU's memory, as in training."""
    return Candidate(replace(job, gib=job.gib or DEFAULT_GIB), config)


def schedules(start: Candidate) -> list[Candidate]:
    """Other numbers of virtual stages, chunks, and recomputation (in full, of which each step keeps what fits, and
    none): all of them together."""
    job, layout, layers = start.job, start.job.model.layout, start.job.model.shape.layers
    divisors = [v for v in VIRTUAL if layers % (layout.pipeline * v) == 0] if layout.pipeline > 1 else []
    candidates = []
    for count in sorted({layout.virtual, *divisors}):
        chunked = with_layout(job, replace(layout, virtual=count), job.micro_batches)
        for kind in dict.fromkeys((layout.recompute, "full", "none")):
            variant = chunked if kind == layout.recompute else with_recompute(chunked, kind)
            candidates += [Candidate(variant, config) for config in chunk_choices(start.config)]
    return [candidate for candidate in candidates if candidate != start]


def micro_batch_counts(candidate: Candidate) -> list[Candidate]:
    """Other numbers of micro-batches for each window."""
    config = candidate.config
    if config.fixed_windows or candidate.job.model.layout.pipeline == 1:
        return []
    counts = [count for count in PER_WINDOW if count != config.micro_batches_per_window]
    return [replace(candidate, config=replace(config, micro_batches_per_window=count)) for count in counts]


def with_recompute(job: Job, kind: str) -> Job:
    layout = replace(job.model.layout, recompute=kind, recompute_layers=1, recompute_block=False)
    return replace(job, model=replace(job.model, layout=layout))


def chunk_choices(config: WlbConfig) -> list[WlbConfig]:
    """Documents whole, and in chunks. A delay that is given leaves no choice."""
    if config.fixed_windows or config.max_delay or config.cp_mode == "dynamic" or config.overlong == "chunk":
        return [config]
    return [replace(config, chunks="off"), replace(config, chunks="on", max_delay=None)]


def with_layout(job: Job, layout: Layout, micro_batches: int) -> Job:
    trainer = replace(
        job.trainer, stages=layout.pipeline, tensor=layout.tensor, interleaves=layout.virtual > 1
    )
    shape = job.model.shape
    if shape.experts is not None and trainer.expert_tensor is None:  # then Megatron takes the other's size
        shape = replace(shape, experts=replace(shape.experts, tensor=layout.tensor))
    model = replace(job.model, shape=shape, layout=layout)
    return replace(job, model=model, micro_batches=micro_batches, trainer=trainer)


def layouts(start: Candidate) -> Iterator[Candidate]:
    """All ways to spread tensor, context and pipeline parallelism over the same GPUs that Megatron takes and whose
    weights fit. Tensor-parallel ranks stay within a node. A profile is of one tensor-parallel size."""
    job = start.job
    layout = job.model.layout
    gpus, batch = layout.gpus, job.micro_batches * layout.data
    for tp in _divisors(min(gpus, job.model.assumptions.node)):
        if job.model.costs is not None and tp != job.model.layout.tensor:
            continue
        for cp in _divisors(gpus // tp) if gpus % tp == 0 else ():
            for pp in _divisors(gpus // (tp * cp)):
                dp = gpus // (tp * cp * pp)
                if batch % (dp * job.micro_batch_size):
                    continue
                try:
                    sizes = replace(layout, tensor=tp, context=cp, pipeline=pp, data=dp, virtual=1)
                    moved = with_layout(job, sizes, batch // dp)
                except (ValueError, WlbError):
                    continue
                if _takes(moved) and moved.weights_problem() is None:
                    yield replace(start, job=moved)


def _takes(job: Job) -> bool:
    """Whether Megatron divides the model and the window so."""
    layout = job.model.layout
    try:
        check_divisible(job.model.shape, layout)
    except WlbError:
        return False
    return job.model.layers % layout.pipeline == 0 and job.window % job.alignment == 0


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def changes(start: Candidate, end: Candidate) -> str:
    """The flags by which another job differs from the given one, "" for none."""
    flags = []
    before, after = _megatron_flags(start.job), _megatron_flags(end.job)
    flags += [f"{flag} {value}" for flag, value in after.items() if before.get(flag) != value]
    if before.keys() - after.keys() and end.job.model.layout.recompute == "none":
        flags.append("(without --recompute-*)")
    flags_before, flags_after = flags_of(start.config).split(" --"), flags_of(end.config).split(" --")
    flags += [f"--{flag.removeprefix('--')}" for flag in flags_after if flag and flag not in flags_before]
    plain = WlbConfig()
    for name in ("chunks", "micro_batches_per_window", "recompute"):
        value = getattr(end.config, name)
        if value == getattr(plain, name) != getattr(start.config, name):
            flags.append(f"--wlb-{name.replace('_', '-')} {value}")
    return " ".join(flags)


def _megatron_flags(job: Job) -> dict[str, str]:
    layout = job.model.layout
    flags = {
        "--tensor-model-parallel-size": str(layout.tensor),
        "--context-parallel-size": str(layout.context),
        "--pipeline-model-parallel-size": str(layout.pipeline),
        "--num-virtual-stages-per-pipeline-rank": str(layout.virtual),
    }
    if layout.recompute != "none":
        flags["--recompute-granularity"] = layout.recompute
    if layout.recompute == "full":
        flags["--recompute-method"] = "block" if layout.recompute_block else "uniform"
        flags["--recompute-num-layers"] = str(layout.recompute_layers)
    return flags


def _likely(candidate: Candidate) -> list[Candidate]:
    """A layout in chunks and whole, with full recomputation, of which each step keeps what fits: a first look then asks
    for little memory."""
    job = with_recompute(candidate.job, "full")
    return [Candidate(job, config) for config in chunk_choices(candidate.config)]


def _unlike(finds: Sequence[Found], limit: int) -> list[Candidate]:
    """The first of each speed: settings with the same one are the same in effect."""
    by_speed = {round(one.tokens_per_second): one.candidate for one in reversed(finds)}
    return [by_speed[speed] for speed in sorted(by_speed, reverse=True)[:limit]]


def _drawn(lengths: Lengths) -> Lengths:
    if len(lengths) <= SAMPLE:
        return lengths
    return np.asarray(lengths[np.sort(np.random.default_rng(0).choice(len(lengths), SAMPLE, replace=False))])


def _limited(candidate: Candidate, looks: tuple[int, int], quick: bool) -> Candidate:
    """Without a blend's corpora: `_found` knows them, and a first look does without."""
    iterations, warm_up = looks
    job = candidate.job
    iterations, warm_up = min(iterations, job.iterations), min(warm_up, job.warm_up)
    return replace(
        candidate, job=replace(job, quick=quick, corpora=(), iterations=iterations, warm_up=warm_up)
    )


def _found(shared: tuple[Lengths, Candidate], candidate: Candidate) -> Found | None:
    """None where the settings cannot train, or do not fit."""
    lengths, request = shared
    job, quick = candidate.job, candidate.job.quick
    corpora = () if quick else request.job.corpora
    try:
        run = replace(job, corpora=corpora).run(_drawn(lengths) if quick else lengths, candidate.config)
        start = as_given(request.job, request.config)
        return _found_of(outcome_of(job, run), candidate, start, len(run.simulated.steps))
    except WlbError:
        return None


def _found_of(outcome: Outcome, candidate: Candidate, start: Candidate, iterations: int) -> Found | None:
    """The figures of the first iterations. None where the run does not fit."""
    memory, times = outcome.memory, outcome.times.first(iterations)
    if memory is None or memory[0] > candidate.job.gpu.room:
        return None
    return Found(
        candidate,
        changes(start, candidate),
        1e9 / times.ns_per_token,
        float(times.steps.max() / 1e6),
        memory[0],
        waiting(times, candidate.job.model.layout),
        float(times.busy.sum() / times.tokens.sum()),
    )


PARTS = {
    "compute": "recomputation and kernels",
    "fill": "filling and draining",
    "micro_batches": "unlike micro-batches, stages, hosts",
    "cp_ranks": "context-parallel ranks",
    "dp_ranks": "data-parallel ranks",
    "after": "gradients and optimizer",
}


def _why(start: Found | None, end: Found) -> str:
    """What changed most, in percent of the given job's time for a token."""
    if start is None:
        return "the job as given does not fit"

    def parts(one: Found) -> dict[str, float]:
        return {"compute": one.compute, **{name: one.compute * share for name, share in one.waits.items()}}

    before, after = parts(start), parts(end)
    total = sum(before.values())
    shares = {name: 100 * (after[name] - before[name]) / total for name in PARTS}
    top = sorted(shares.items(), key=lambda item: -abs(item[1]))[:3]
    return "; ".join(f"{PARTS[name]} {share:+.0f} %" for name, share in top if abs(share) >= 0.5)


_inherited: Any = None
"""In a process of `side_by_side`: what it shares with the first."""


@contextmanager
def side_by_side(shared: Any) -> Iterator[Callable[..., Any]]:
    """A function that calls a module's function, with `shared` before its arguments, in another process: a Future.

    Processes are forked at the first call and inherit `shared`: lengths of 100M documents are not sent. An exception
    here ends them at once. Raises WlbError if one was killed.
    """
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else None)
    pool = ProcessPoolExecutor(min(4, os.cpu_count() or 1), context, _inherit, (shared,))
    gc.disable()  # plans are millions of tuples without cycles, and each collection would look at all of them
    try:
        yield lambda *called: pool.submit(_call, *called)
    except BrokenExecutor:
        raise WlbError(
            "a process of the analysis was ended from outside, as Linux does where memory runs out: free some, or give "
            "--no-split and --search none"
        ) from None
    except BaseException:
        for process in (pool._processes or {}).values():
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        gc.enable()


def _inherit(shared: Any) -> None:
    global _inherited
    _inherited = shared
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes: the first one ends the others


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(_inherited, *arguments)
