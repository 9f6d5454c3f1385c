"""What every packer is: pieces that arrived go in, one iteration's grid of micro-batches comes out.

A packer packs the global batch, micro_batches x dp bins; dp only regroups the bins (assign.py). So which documents
train in which iteration, and the state, do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.pipeline.step_law import StepLaw
from wlb_megatron.plan import MicroBatch, Piece
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN, CostModel

Grid = tuple[tuple[MicroBatch, ...], ...]
"""Micro-batches of one iteration: `grid[m][d]` is micro-batch m of data-parallel rank d."""


class Ranks(NamedTuple):
    """Data-parallel size, pipeline stages, model chunks of a stage, and of how many micro-batches an interleaved
    schedule takes a multiple."""

    dp: int = 1
    pp: int = 1
    vpp: int = 1
    group: int = 1

    def law(self, cost: CostModel) -> StepLaw:
        """What a step takes on these ranks."""
        each, least = (round(UNITS_PER_TOKEN * t) for t in (cost.per_micro_batch, cost.least_micro_batch))
        return StepLaw(self.pp, self.vpp, self.group, each, least)


ONE_RANK = Ranks()


class Packed(NamedTuple):
    """`put_back`: pieces of this iteration's arrivals that the packer cannot promise to train in time; the
    planner offers them again first in the next iteration, and they count as arriving then. Nearly always empty."""

    grid: Grid
    put_back: tuple[Piece, ...] = ()


class Batch(NamedTuple):
    """bins: micro-batches of this iteration's global batch, over all ranks. iterations: for how many iterations of
    that size, this one included, pieces arrived; with a packer of several intake_batches 0 where none were due."""

    bins: int
    iterations: int = 1


class Packer(Protocol):
    """State of one packing policy. Not thread-safe; every rank runs its own and all get the same plans."""

    bins: int
    """Windows of a global batch, over all ranks; of the largest one if batches grow. There are as many micro-batches,
    or as many more as the packer finds best."""

    held_tokens: int
    """Tokens that a pipeline stage holds at once at most, where groups of micro-batches hold more than the schedule
    does by itself (chunk_packer.py); 0: no more than that."""

    law: StepLaw
    """What a step of these micro-batches is predicted to take."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a micro-batch, without end padding."""

    most_pieces: int
    """Pieces that can train for each window of a global batch at most: no more are taken in."""

    intake_batches: int
    """Global batches taken in at once at most; in the other iterations nothing arrives."""

    @property
    def waiting(self) -> tuple[Piece, ...]:
        """Pieces that arrived and have not trained, oldest first."""

    def pack(self, iteration: int, arrived: Sequence[Piece], batch: Batch, draining: bool = False) -> Packed:
        """One iteration's micro-batches. Arrived pieces come in stream order, none empty or above the window (chunks:
        the longest document).
        From one iteration to the next, batch.bins may grow.

        draining: the stream has ended, release what waits; only then may a micro-batch be empty, and only
        when nothing waits any more.
        """

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """What `state` returns now, made when called, also after later calls of `pack`. Cheap: one is taken in each
        iteration, and few are asked for."""

    def state(self) -> dict[str, Any]:
        """What waits, as JSON-able integers; to be taken between two calls of `pack`."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises ValueError if it was made with other settings, and says which."""


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
    say: Callable[[str], None] = lambda _: None,
) -> Packer:
    """The packer that `config.packing` names.

    window: tokens of --seq-length. micro_batches: windows of one data-parallel rank, in the largest global batch. vpp:
    model chunks of a stage; group: of how many micro-batches an interleaved schedule takes a multiple (default: pp).
    alignment: a micro-batch's tokens are padded up to a multiple of it. sample: document lengths
    (tokens, at most the window) on which `thresholds=auto` is found; without one a rule of thumb serves. longest:
    tokens of the longest piece, above the window only where overlong is "chunk" (default: the window).
    adopt_max_tokens: a loaded state brings its own Lmax if that, padded, is at most so many tokens. no_chunks: (flag,
    cure) of each setting under which documents cannot train in chunks. say: is told whether they do, and why.
    Raises ValueError on settings that cannot work.
    """
    from wlb_megatron.packing.baselines import FixedGreedyPacker, OriginalPacker
    from wlb_megatron.packing.foresee import too_many_documents
    from wlb_megatron.packing.solver import FixedSolverPacker

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
    ranks = Ranks(dp, pp, vpp, (group or pp) if vpp > 1 else 1)
    per_window = read_per_window(config.micro_batches_per_window)
    if sample:
        free = per_window if config.packing == "varlen" else 1
        each = most_per_window(ranks.law(cost), free)
        if told := too_many_documents(sample, window, config.max_documents, each):
            say(told)
    if config.packing == "varlen":
        return _make_varlen(
            *(config, cost, window, micro_batches, alignment, sample, ranks),
            *(longest or window, adopt_max_tokens, no_chunks, say),
        )
    for asked, flag in (
        (config.chunks == "on", "--wlb-chunks on"),
        (config.overlong == "chunk", "--wlb-overlong chunk"),
    ):
        if asked:
            raise WlbError(f"{flag} needs --wlb-packing varlen, not {config.packing}: change one of them")
    fixed: dict[str, type[OriginalPacker | FixedGreedyPacker]] = {
        "original": OriginalPacker,
        "fixed-greedy": FixedGreedyPacker,
        "fixed-solver": FixedSolverPacker,
    }
    if per_window not in (None, 1):
        raise WlbError(
            f"--wlb-micro-batches-per-window {config.micro_batches_per_window} needs --wlb-packing varlen: windows of "
            "fixed length are one micro-batch each"
        )
    if config.packing not in fixed:
        raise WlbError(f"unknown packing {config.packing!r}: choose {', '.join(fixed)} or varlen")
    return fixed[config.packing](config, cost, window=window, bins=micro_batches * dp, ranks=ranks)


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
    say: Callable[[str], None],
) -> Packer:
    from wlb_megatron.packing.choose_chunks import choose_chunks, holds_whole, with_chunks
    from wlb_megatron.packing.chunk_packer import ChunkPacker
    from wlb_megatron.packing.delay_bound import Limits
    from wlb_megatron.packing.foresee import unpaired
    from wlb_megatron.packing.thresholds import MOST_BINS, find_thresholds, read_thresholds, rule_of_thumb
    from wlb_megatron.packing.varlen_packer import VarlenPacker, longest_micro_batch

    max_delay = MAX_DELAY if config.max_delay is None else config.max_delay
    if max_delay < 0:
        raise WlbError(f"--wlb-max-delay must not be negative, got {max_delay}")
    # The paper's release knows one micro-batch a window alone.
    per_window = read_per_window(config.micro_batches_per_window) if config.release == "balance" else 1
    if config.cp_mode == "dynamic":  # groups decide how many micro-batches there are
        per_window = 1
    given = read_thresholds(config.thresholds)
    by_balance = config.release == "balance"
    limits = Limits(micro_batches * ranks.dp, window, window, config.max_documents, max_delay)

    def whole(few: Limits, on: Ranks, thresholds: Sequence[int]) -> VarlenPacker:
        capacity = longest_micro_batch(config, window, alignment)
        few = replace(few, capacity=capacity, max_delay=max_delay)
        return VarlenPacker(
            cost,
            few,
            thresholds,
            on,
            per_window=per_window,
            by_balance=by_balance,
            adopt_thresholds=given is None,
            # Lmax need be no multiple of the alignment: what it is padded to must fit.
            adopt_capacity=adopt_max_tokens // alignment * alignment,
        )

    short = with_chunks(limits, config.max_tokens, alignment)
    usual = rule_of_thumb(window) if given is None else given
    chunks, why = choose_chunks(
        *(config, cost, short, ranks, per_window, sample, longest),
        *(holds_whole(config, window, alignment), no_chunks),
        partial(whole, thresholds=usual),
    )
    say(f"documents in chunks: {'yes' if chunks else 'no'} ({why})")
    if chunks and short.capacity * MOST_PER_WINDOW < window:
        raise WlbError(
            f"--wlb-max-tokens {config.max_tokens} cuts a window into more than {MOST_PER_WINDOW} micro-batches: set "
            f"it to {-(-window // (MOST_PER_WINDOW * alignment)) * alignment} or more"
        )
    if chunks and given:
        say(
            f"WARNING: --wlb-thresholds {config.thresholds} is not used: documents in chunks never wait; leave it out, "
            "or set --wlb-chunks off"
        )
    if chunks:
        return ChunkPacker(cost, short, ranks, per_window=per_window, longest=longest)
    if given is None and sample is not None:
        limits = replace(limits, capacity=longest_micro_batch(config, window, alignment))
        usual = find_thresholds(sample, cost, limits, ranks, per_window).thresholds
    if sample and max_delay:
        few = replace(limits, bins=min(limits.bins // ranks.dp, MOST_BINS))
        told = unpaired(sample, window, whole(few, ranks._replace(dp=1), usual))
        if told:
            say(told)
    return whole(limits, ranks, usual)


MAX_DELAY = 16
"""Iterations that a document waits at most, unless the user says otherwise."""


def read_per_window(text: str) -> float | None:
    """Micro-batches for each window of `config.micro_batches_per_window`, None for auto."""
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= MOST_PER_WINDOW:
        raise WlbError(
            f"--wlb-micro-batches-per-window {text!r} is neither auto nor a number from 1 to {MOST_PER_WINDOW}"
        )
    return value


MOST_PER_WINDOW = 64


def most_per_window(law: StepLaw, per_window: float | None, *, always: bool = False) -> int:
    """Micro-batches that a window is given at most, in whole ones; see StepLaw.counts."""
    return law.counts(law.group, per_window, always=always)[-1] // law.group


def check_settings(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError naming every setting in which a saved state differs from the present run."""
    changed = [f"{key} was {saved.get(key)!r}, is {now[key]!r}" for key in now if saved.get(key) != now[key]]
    if changed:
        raise WlbError(
            f"the saved packing state does not fit these settings: {'; '.join(changed)}: set them as before"
        )
