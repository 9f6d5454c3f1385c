"""Builds the packer that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from wlb_megatron.bounds import COUNT
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunks.choose_chunks import Times, choose_chunks, holds_whole, with_chunks
from wlb_megatron.packing.chunks.chunk_packer import ChunkPacker
from wlb_megatron.packing.fixed.baselines import FixedGreedyPacker, OriginalPacker
from wlb_megatron.packing.fixed.solver import FixedSolverPacker
from wlb_megatron.packing.foresee import too_many_documents, unpaired
from wlb_megatron.packing.packer import MOST_PER_WINDOW, Packer, Ranks, most_per_window, read_per_window
from wlb_megatron.packing.varlen.delay_bound import Limits
from wlb_megatron.packing.varlen.thresholds import MOST_BINS, find_thresholds, read_thresholds, rule_of_thumb
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker, lmax
from wlb_megatron.pipeline.step_law import StageRoom
from wlb_megatron.workload.cost_model import CostModel

FIXED: dict[str, type[OriginalPacker | FixedGreedyPacker]] = {
    "original": OriginalPacker,
    "fixed-greedy": FixedGreedyPacker,
    "fixed-solver": FixedSolverPacker,
}
"""Packers of fixed windows, by name."""

MAX_DELAY = 16
"""Default limit of a document's wait, in iterations."""

BATCH_SPREAD = 150
"""Default most tokens of a step, in percent of a global batch's."""


def read_spread(text: str) -> int | None:
    """Percent of a global batch's tokens from `config.batch_spread`; None for none."""
    if text in ("auto", "none"):
        return BATCH_SPREAD if text == "auto" else None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= COUNT:
        raise WlbError(f"--wlb-batch-spread {text!r} is neither auto, none, nor a number from 1")
    return round(100 * value)


def make_packer(
    config: WlbConfig,
    cost: CostModel,
    *,
    window: int,
    micro_batches: int,
    dp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    group: int | None = None,
    alignment: int = 1,
    sample: Sequence[int] | None = None,
    longest: int | None = None,
    adopt_max_tokens: int = 0,
    no_chunks: Sequence[tuple[str, str]] = (),
    rooms: tuple[StageRoom, StageRoom] | None = None,
    times: Times | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Packer:
    """The packer that `config.packing` names.

    * window: tokens of --seq-length. micro_batches: windows of one data-parallel rank, in the largest global batch.
    * vpp: model chunks per stage. group: the interleaved schedule takes a multiple of this many micro-batches
      (default: pp).
    * alignment: a micro-batch's tokens are padded up to a multiple of it.
    * sample: document lengths (tokens, at most the window) on which `thresholds=auto` is found; without one, a rule
      of thumb.
    * longest: tokens of the longest piece, above the window only if overlong is "chunk" (default: the window).
    * adopt_max_tokens: a loaded state keeps its own Lmax if that, padded, is at most this many tokens.
    * no_chunks: (flag, cure) of each setting under which documents cannot train in chunks.
    * rooms: of the first and the last stage, where steps keep as many layers as fit.
    * times: simulates plans, by which `chunks=auto` chooses; None: the packer's law does.
    * say: called with a line on whether documents train in chunks, and why.

    Raises ValueError on settings that cannot work.
    """
    for name, value in (
        ("window", window),
        ("micro_batches", micro_batches),
        ("dp", dp),
        ("pp", pp),
        ("vpp", vpp),
    ):
        if value < 1:
            raise WlbError(f"{name} must be at least 1, got {value}")
    if alignment < 1 or window % alignment:
        raise WlbError(
            f"window of {window} tokens is not a multiple of {alignment}, to which micro-batches are padded: "
            "choose --seq-length as a multiple of context-parallel x tensor-parallel size"
        )
    if config.max_documents < 1:
        raise WlbError(f"max_documents must be at least 1, got {config.max_documents}")
    ranks = Ranks(dp, pp, vpp, (group or pp) if vpp > 1 else 1, rooms)
    per_window = read_per_window(config.micro_batches_per_window)
    if sample:
        free = per_window if config.packing == "varlen" else 1
        most = most_per_window(ranks.law(cost), free)
        if warning := too_many_documents(sample, window, config.max_documents, most):
            say(warning)
    if config.packing == "varlen":
        return _make_varlen(
            *(config, cost, window, micro_batches, alignment, sample, ranks),
            *(longest or window, adopt_max_tokens, no_chunks, times, say),
        )
    for asked, flag in (
        (config.chunks == "on", "--wlb-chunks on"),
        (config.overlong == "chunk", "--wlb-overlong chunk"),
    ):
        if asked:
            raise WlbError(f"{flag} needs --wlb-packing varlen, not {config.packing}: change one of them")
    if per_window not in (None, 1):
        raise WlbError(
            f"--wlb-micro-batches-per-window {config.micro_batches_per_window} needs --wlb-packing varlen: windows of "
            "fixed length are one micro-batch each"
        )
    if config.packing not in FIXED:
        raise WlbError(f"unknown packing {config.packing!r}: choose {', '.join(FIXED)} or varlen")
    if pp > 1:
        say(
            f"documents in chunks: no (not with --wlb-packing {config.packing}; see analyze --packing varlen)"
        )
    return FIXED[config.packing](config, cost, window=window, bins=micro_batches * dp, ranks=ranks)


def _make_varlen(
    config: WlbConfig,
    cost: CostModel,
    window: int,
    micro_batches: int,
    alignment: int,
    sample: Sequence[int] | None,
    ranks: Ranks,
    longest: int,
    adopt_max_tokens: int,
    no_chunks: Sequence[tuple[str, str]],
    times: Times | None,
    say: Callable[[str], None],
) -> Packer:

    max_delay = MAX_DELAY if config.max_delay is None else config.max_delay
    if max_delay < 0:
        raise WlbError(f"--wlb-max-delay must not be negative, got {max_delay}")
    # The paper's release works only with one micro-batch per window.
    per_window = read_per_window(config.micro_batches_per_window) if config.release == "balance" else 1
    if config.cp_mode == "dynamic":  # groups decide how many micro-batches there are
        per_window = 1
    thresholds_set = read_thresholds(config.thresholds)
    by_balance = config.release == "balance"
    limits = Limits(
        *(micro_batches * ranks.dp, window, window, config.max_documents, max_delay),
        read_spread(config.batch_spread),
    )

    def whole(few: Limits, on: Ranks, thresholds: Sequence[int]) -> VarlenPacker:
        capacity = lmax(config, window, alignment)
        few = replace(few, capacity=capacity, max_delay=max_delay)
        return VarlenPacker(
            cost,
            few,
            thresholds,
            on,
            per_window=per_window,
            by_balance=by_balance,
            adopt_thresholds=thresholds_set is None,
            # Lmax need not be a multiple of the alignment; its padded size must fit.
            adopt_capacity=adopt_max_tokens // alignment * alignment,
        )

    short = with_chunks(limits, config.max_tokens, alignment)
    usual = rule_of_thumb(window) if thresholds_set is None else thresholds_set
    chunks, why = choose_chunks(
        *(config, cost, short, ranks, per_window, sample, longest),
        *(holds_whole(config, window, alignment), no_chunks),
        *(partial(whole, thresholds=usual), times),
    )
    say(f"documents in chunks: {'yes' if chunks else 'no'} ({why})")
    if chunks and short.capacity * MOST_PER_WINDOW < window:
        raise WlbError(
            f"--wlb-max-tokens {config.max_tokens} cuts a window into more than {MOST_PER_WINDOW} micro-batches: set "
            f"it to {-(-window // (MOST_PER_WINDOW * alignment)) * alignment} or more"
        )
    if chunks and thresholds_set:
        say(
            f"WARNING: --wlb-thresholds {config.thresholds} is not used: documents in chunks never wait; leave it out, "
            "or set --wlb-chunks off"
        )
    if chunks and config.batch_spread not in ("auto", "none"):
        say(
            f"WARNING: --wlb-batch-spread {config.batch_spread} bounds nothing: documents in chunks never wait, so "
            "steps above it are only counted; leave it out, or add --wlb-chunks off"
        )
    if chunks:
        return ChunkPacker(cost, short, ranks, per_window=per_window, longest=longest)
    if thresholds_set is None and sample is not None:
        limits = replace(limits, capacity=lmax(config, window, alignment))
        usual = find_thresholds(sample, cost, limits, ranks, per_window).thresholds
    if sample and max_delay:
        few = replace(limits, bins=min(limits.bins // ranks.dp, MOST_BINS))
        warning = unpaired(sample, window, whole(few, ranks._replace(dp=1), usual))
        if warning:
            say(warning)
    return whole(limits, ranks, usual)
