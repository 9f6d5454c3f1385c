"""Decides whether long documents train in chunks: by the flag, or by what a sample of the corpus predicts.

For training and commands: which jobs cannot train so, and which jobs' ranks must keep in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.packer import Packer, PackingJob, Ranks, Times, per_window_of
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.outlier_queues import Limits
from wlb_megatron.packing.varlen.thresholds import MOST_AT_ONCE, MOST_BINS, Repeated, sampled, step_over_ideal

LONGEST = (3, 4)
"""The longest micro-batch of a plan with chunks, in windows. A longer document is cut into chunks."""

PAYS = 0.98
"""Chunks are used if their step, by the packer's law, takes at most this share of the step with whole documents."""

ALIKE = 1.01
"""The same by simulated times, or by the law where it knows which layers a step keeps. With chunks no document waits
and steps are alike, which is worth a hundredth. On two H200s, 16 layers of 4096, both were predicted alike and chunks
trained 1.8 % more tokens (docs/measured.md)."""

SETTLE, LOOKED, AT_ONCE = 16, (8, 48), 1024
"""What is simulated for a choice: iterations that only fill the queues, the fewest and most iterations that are timed,
and about how many documents one has. Of more, fewer data-parallel ranks are looked at."""


def holds_whole(config: WlbConfig, window: int, alignment: int = 1) -> bool:
    """Whether micro-batches can hold uncut documents: Lmax is 1.25 windows or more, or not set."""
    return config.max_tokens is None or config.max_tokens // alignment * alignment * 4 >= window * 5


class ChunkChoice(NamedTuple):
    """Whether documents train in chunks, and why. ratio: the step in chunks over that with whole documents."""

    chunks: bool
    why: str
    ratio: float = 1.0


def chunk_capacity(window: int, max_tokens: int | None, alignment: int) -> int:
    """Tokens of the longest micro-batch of a plan with chunks. max_tokens: the flag's value; None: the longest
    useful.
    """
    longest_useful = window * LONGEST[0] // LONGEST[1]
    return max(alignment, min(longest_useful, max_tokens or longest_useful) // alignment * alignment)


Whole = Callable[[Limits, Ranks], Packer]
"""Makes the packer without chunks, for limits.bins windows on ranks."""


def choose_chunks(job: PackingJob, limits: Limits, make_whole: Whole) -> ChunkChoice:
    """Whether documents train in chunks, and why.

    WlbError if chunks are asked for, by --wlb-chunks or by --wlb-overlong, and refused. A delay that is given acts:
    if chunks may be left out, they are.

    Args:
        limits: those of the plan with chunks.
    """
    config, ranks = job.config, job.ranks
    longest_tokens = job.longest or job.window
    fits_whole = holds_whole(config, job.window, job.alignment)
    refusals = [*job.no_chunks, *settings_refused(config)]
    asking_flag = _asked_for(config)
    if asking_flag is not None and config.chunks == "off":
        raise WlbError(
            f"{asking_flag[0]} cannot be combined with --wlb-chunks off: leave it out, or {asking_flag[1]}"
        )
    if config.chunks == "off":
        return ChunkChoice(False, "--wlb-chunks off")
    if refusals:
        flag, cure = refusals[0]
        if asking_flag is not None:
            raise WlbError(f"{asking_flag[0]} cannot be combined with {flag}: {cure}, or {asking_flag[1]}")
        lost = ""
        if (
            ranks.pp > 1
            and job.sample
            and longest_tokens <= limits.window
            and fits_whole
            and config.cp_mode == "fixed"
        ):
            prediction = _predicted(job, job.sample, limits, make_whole)
            lost = f"; chunks would shorten the predicted step by {1 - prediction.ratio:.0%}"
            lost = lost if prediction.chunks else "; chunks would bring nothing"
        return ChunkChoice(False, f"not with {flag}{lost}")
    if config.chunks == "on":
        return ChunkChoice(True, "--wlb-chunks on")
    if longest_tokens > limits.window:
        return ChunkChoice(True, f"documents of up to {longest_tokens:,} tokens train whole")
    if not fits_whole:
        return ChunkChoice(True, f"micro-batches of {config.max_tokens:,} tokens do not hold whole documents")
    if ranks.pp == 1:
        return ChunkChoice(False, "there is no pipeline to fill")
    if not job.sample:
        return ChunkChoice(False, "no documents to predict from")
    return _predicted(job, job.sample, limits, make_whole)


def _predicted(job: PackingJob, sample: Sequence[int], limits: Limits, make_whole: Whole) -> ChunkChoice:
    """See choose_chunks."""
    cost, ranks, times = job.cost, job.ranks, job.times
    lengths = sampled(sample)
    windows, mean = limits.bins // ranks.dp, int(lengths.sum()) / len(lengths)
    at_once = MOST_AT_ONCE if times is None else AT_ONCE
    fill = max(1, int(at_once * mean) // limits.window)  # so many windows
    windows = min(windows, fill) if times is not None else min(windows, fill, MOST_BINS)
    dp = 1 if times is None else min(ranks.dp, max(1, fill // windows))
    few_limits, few_ranks = replace(limits, bins=windows * dp), ranks._replace(dp=dp)
    packers = (
        ChunkPacker(cost, few_limits, few_ranks, per_window=per_window_of(job.config)),
        make_whole(few_limits, few_ranks),
    )
    tokens = few_limits.bins * limits.window
    if times is None:
        cut_time, uncut_time = (
            step_over_ideal(lengths, tokens, packer, cost.per_earlier_key) for packer in packers
        )
        pays = cut_time <= (PAYS if ranks.rooms is None else ALIKE) * uncut_time
        why = f"predicted step over ideal: {cut_time:.2f} in chunks, {uncut_time:.2f} whole"
        return ChunkChoice(pays, why, cut_time / uncut_time)
    looked = min(LOOKED[1], max(LOOKED[0], int(LOOKED[0] * at_once * mean) // tokens))
    cut_time, uncut_time = (_per_work(lengths, tokens, packer, looked, times) for packer in packers)
    speed = f"{uncut_time / cut_time:.3f} times as fast as whole documents"
    return ChunkChoice(cut_time <= ALIKE * uncut_time, f"predicted: {speed}", cut_time / uncut_time)


def _per_work(lengths: np.ndarray, tokens: int, packer: Packer, looked: int, times: Times) -> float:
    """Simulated nanoseconds for a unit of work. A token's would depend on which documents come first."""
    planner = Planner(Repeated(lengths), packer, global_tokens=tokens)
    plans = list(islice(iter(planner.next_iteration, None), SETTLE + looked))[SETTLE:]
    return float(times(plans).sum()) / max(1, sum(plan.ideal for plan in plans))


def _asked_for(config: WlbConfig) -> tuple[str, str] | None:
    """The flag that asks for chunks, and what to set instead; None where they may be left out."""
    if config.overlong == "chunk":
        return "--wlb-overlong chunk", "set --wlb-overlong split"
    return ("--wlb-chunks on", "set --wlb-chunks auto") if config.chunks == "on" else None


def settings_refused(config: WlbConfig) -> list[tuple[str, str]]:
    """(flag, cure) of each of the plugin's own settings that cannot be combined with documents in chunks."""
    rows = (
        (
            config.cp_mode == "dynamic",
            "--wlb-cp-mode dynamic",
            "groups take whole documents; use --wlb-cp-mode fixed",
        ),
        (
            config.release == "full",
            "--wlb-release full",
            "it is the paper's release of whole documents; leave it out",
        ),
        (
            bool(config.max_delay),
            f"--wlb-max-delay {config.max_delay}",
            "documents in chunks never wait; leave it out",
        ),
    )
    return [(flag, cure) for applies, flag, cure in rows if applies]


LEAST_RELEASE = (0, 17)
"""The first megatron-core whose schedule can run more forwards ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Megatron's settings that decide about chunks.

    Args:
        stages: pipeline stages.
        tensor, expert, expert_tensor: parallel sizes.
        mtp: further tokens that are predicted.
        balancing: kinds of routers' losses.
        shards_weights: FSDP of either kind.
        shares_scales: FP8 whose scales come from the largest values of all data-parallel ranks.
        offloads: offloads activations module by module.
        interleaves: has virtual stages.
        offloads_layers: offloads whole layers.
        replays_routes: experts' choices are recorded and replayed.
        release: the one of megatron-core.
        unknown_schedule: it interleaves stages in a way that the plugin does not know.
        hides_padding: its block gives layers that it does not recompute no padding mask.
        delta_nets: it has gated delta nets.
    """

    stages: int = 1
    tensor: int = 1
    experts: int = 0
    expert: int = 1
    expert_tensor: int | None = None
    balancing: tuple[str, ...] = ()
    shards_weights: bool = False
    shares_scales: bool = False
    mtp: int = 0
    offloads: bool = False
    interleaves: bool = False
    offloads_layers: bool = False
    replays_routes: bool = False
    release: str | None = None
    unknown_schedule: bool = False
    hides_padding: bool = False
    delta_nets: bool = False

    def chunks_refused(self, chunks: str = "on") -> list[tuple[str, str]]:
        """(flag, cure) of each setting under which a step cannot run in groups of micro-batches, or runs so only if
        asked. `chunks` is the choice of --wlb-chunks."""
        rows = (
            (
                self.release is not None
                and self.stages > 1
                and tuple(map(int, self.release.split(".")[:2])) < LEAST_RELEASE,
                f"megatron-core {self.release} with --pipeline-model-parallel-size above 1",
                "its schedule cannot run more forwards ahead; use 0.17 or later",
            ),
            (
                self.unknown_schedule,
                "--num-virtual-stages-per-pipeline-rank / --num-layers-per-virtual-pipeline-stage",
                "this Megatron's interleaved schedule is not the one that was tried; use one model chunk a stage, or a "
                "release that was tried",
            ),
            (
                self.offloads and self.interleaves,
                "--fine-grained-activation-offloading over virtual stages",
                "it has learned in which order its first step ran model chunks, but chunks need another; use one model "
                "chunk a stage, or recompute instead",
            ),
            (
                self.offloads and chunks != "on",
                "--fine-grained-activation-offloading",
                "chunks were tried with it on CPUs alone, so give --wlb-chunks on",
            ),
            (
                self.offloads_layers,
                "--cpu-offloading-num-layers",
                "Transformer Engine frees a micro-batch's activations when the next forward begins, but chunks need "
                "those of several; recompute instead",
            ),
            (
                self.experts > 0 and self.replays_routes,
                "--moe-enable-routing-replay",
                "it replays experts' choices in the order of the forwards, but chunks run backward last first; drop it",
            ),
            (
                self.delta_nets,
                "gated delta nets (--hybrid-layer-pattern, --experimental-attention-variant)",
                "their state does not pass from chunk to chunk; train without chunks",
            ),
        )
        return [(flag, cure) for applies, flag, cure in rows if applies]

    def keeping_changes(self, chunks: str) -> str | None:
        """What comes out otherwise where some micro-batches keep a layer that others recompute; None: nothing.

        global_aux_loss is a mean over the micro-batches so far. One that is kept is counted in its forward, one that is
        recomputed before its backward. They come in the same order on a single stage without chunks alone. chunks: of
        --wlb-chunks.
        """
        if self.experts == 0:
            return None
        if "global_aux_loss" in self.balancing and (self.stages > 1 or chunks != "off"):
            return "global_aux_loss, a mean over the micro-batches so far (without a pipeline, --wlb-chunks off helps)"
        if self.hides_padding:
            return "routers' counts, for this Megatron's kept layers see no padding mask (0.17, dev)"
        return None

    @property
    def in_step(self) -> bool:
        """Whether data-parallel ranks need the same order of forwards and backwards, and so the same groups."""
        return bool(self.meetings())

    def meetings(self) -> list[str]:
        """What data-parallel ranks exchange inside a forward or a backward. Each must then be in the same one.

        Ranks always run equally many micro-batches, so only groups of chunks can bring them out of step. All other
        exchanges between them come once a step, at the same place of it: parameters by bucket in the first forward
        (--overlap-param-gather), gradients by bucket in the last backward (--overlap-grad-reduce), and after it
        experts' biases, counts of tokens, norms and logged losses. (Read in Megatron 0.16 to 0.19, main and dev, and
        in Transformer Engine 2.18 to 2.20.)
        """
        shared = self.expert > 1 or (self.expert_tensor or self.tensor) > self.tensor
        rows = (
            (self.experts > 0 and shared, "experts exchange tokens"),
            (
                self.experts > 0 and "global_aux_loss" in self.balancing,
                "routers exchange counts of tokens, again under recompute",
            ),
            (self.shards_weights, "FSDP exchanges parameters and gradients"),
            (self.shares_scales, "FP8 with delayed scaling takes its largest values, again under recompute"),
        )
        return [what for applies, what in rows if applies]
