"""One dataclass holds every setting of the plugin; arguments.py makes the --wlb-* flags from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wlb_megatron.bounds import COUNT, LARGEST, SECONDS, TOKENS

PACKINGS = ("original", "fixed-greedy", "fixed-solver", "varlen")
RELEASES = ("balance", "full")
SHARDINGS = ("per-sequence", "per-document", "hybrid", "adaptive")
OVERLONG = ("split", "truncate", "drop", "chunk")
KERNELS = ("auto", "cudnn", "fa4")


def _setting(default: Any, help: str, **meta: Any) -> Any:
    return field(default=default, metadata={"help": help, **meta})


@dataclass(frozen=True, kw_only=True)
class WlbConfig:
    """Settings of the plugin. Field `max_tokens` is flag --wlb-max-tokens, and so on."""

    packing: str = _setting(
        "varlen",
        "how documents become micro-batches: original (arrival order, windows of --seq-length), fixed-greedy "
        "(balanced windows), fixed-solver (the same by an exact solver), varlen (variable length with delay)",
        choices=PACKINGS,
    )
    sharding: str = _setting(
        "adaptive",
        "how a micro-batch is cut over context-parallel ranks: per-sequence, per-document, hybrid (some documents "
        "whole, some cut), adaptive (for each micro-batch the one predicted fastest)",
        choices=SHARDINGS,
    )
    max_tokens: int | None = _setting(
        None,
        "most tokens of a micro-batch, Lmax (tokens; default: 1.5 x --seq-length, or what fits the GPU's memory with "
        "a tenth to spare, if that is less)",
        type=int,
        within=(1, TOKENS),
    )
    micro_batches_per_window: str = _setting(
        "auto",
        "micro-batches that a data-parallel rank makes of each window it trains: auto (in every iteration the number "
        "with the least predicted step; 1 without a pipeline), or a number from 1, such as 2 or 1.5",
    )
    micro_batch_cost: float | None = _setting(
        None,
        "what one more micro-batch costs by itself, as tokens of linear work (tokens; default: from the profile or "
        "the model's shape, 1000 x context-parallel size where neither is known)",
        type=float,
        within=(0, TOKENS),
    )
    chunks: str = _setting(
        "auto",
        "train long documents in chunks, in several micro-batches of one iteration: auto (where it is predicted to be "
        "faster and all that is asked for supports it), on, off. With chunks no document is delayed",
        choices=("auto", "off", "on"),
    )
    max_delay: int | None = _setting(
        None,
        "a document trains at most this many iterations after it arrived (iterations; default: 16, with chunks 0)",
        type=int,
        within=(0, COUNT),
    )
    thresholds: str = _setting(
        "auto",
        "lengths from which a document waits in an outlier queue: auto, none, or e.g. 49152,90112 (tokens)",
    )
    release: str = _setting(
        "balance",
        "when an outlier queue releases documents: balance (as many as balance this iteration best, at a price of "
        "waiting), full (one for each micro-batch once it holds so many, as in the WLB-LLM paper)",
        choices=RELEASES,
    )
    balance_batches: int = _setting(
        1,
        "fixed-greedy and fixed-solver balance over this many global batches (iterations)",
        type=int,
        within=(1, COUNT),
    )
    cp_mode: str = _setting(
        "fixed",
        "who shares a micro-batch: fixed (context-parallel groups of --context-parallel-size), dynamic (each step, "
        "groups of different size over the data x context parallel ranks, planned by predicted time)",
        choices=("fixed", "dynamic"),
    )
    solver_seconds: float = _setting(
        1.0,
        "time limit for one plan of fixed-solver, or of dynamic groups (seconds)",
        type=float,
        within=(1e-3, SECONDS),
    )
    quadratic_at: float | None = _setting(
        None,
        "length at which a document's attention costs as much as everything else: work = d + d*d/X "
        "(tokens; default: from the model's shape)",
        type=float,
        within=(1, LARGEST),
    )
    document_cost: float | None = _setting(
        None,
        "fixed cost of a document in a micro-batch, as tokens of linear work (tokens; default: from the model's shape "
        "and a built-in H100 kernel table on GPUs, else 0)",
        type=float,
        within=(0, TOKENS),
    )
    max_documents: int = _setting(
        4096,
        "most documents of a micro-batch; kernels launch one block row per document (documents)",
        type=int,
        within=(1, COUNT),
    )
    overlong: str = _setting(
        "split",
        "a document longer than --seq-length is split at the window, truncated to it, or dropped (counted); chunk: it "
        "trains whole, in chunks of one iteration, up to what memory, --max-position-embeddings and a data-parallel "
        "rank's share of the iteration allow, and is split there",
        choices=OVERLONG,
    )
    kernels: str = _setting(
        "auto",
        "attention's kernels on GPUs: cudnn (through Transformer Engine), fa4 (FlashAttention-4, the extra fa4), auto "
        "(fa4 for the layers that it serves, where it is installed, else cudnn)",
        choices=KERNELS,
    )
    regather_keys: bool = _setting(
        False,
        "exchange keys again in backward instead of keeping them: less memory, one more exchange a layer",
    )
    rehearsal: str = _setting(
        "auto",
        "before step 1, one forward and backward of micro-batches of Lmax tokens take the memory that any step can "
        "need: auto (on GPUs), always, never",
        choices=("auto", "always", "never"),
    )
    graph_seconds: float = _setting(
        60.0,
        "time for building attention's kernels before step 1: cuDNN's graphs, likeliest sizes first, of which others "
        "are built in the step that first needs them, about 0.13 s each (seconds)",
        type=float,
        within=(0, SECONDS),
    )
    fresh_order: bool = _setting(
        False,
        "go on from a checkpoint with other corpora, weights, --seq-length or packing, or of a run without the plugin: "
        "what waits trains first, corpora go on where they stood, new ones begin; with another --seed, or nothing "
        "else changed, all begin an epoch. A run that has done so goes on with it",
    )
    log: str | None = _setting(None, "append one JSON line per trained iteration to this file (path)")
    log_plans: bool = _setting(
        False,
        "add the document lengths of every micro-batch to the lines of --wlb-log (1 KB for 200 documents)",
    )
    profile: str | None = _setting(
        None,
        "plan, choose shardings and predict iterations by this profile, which wlb-megatron profile made of this "
        "model on this GPU (path; default: the model's shape and built-in H100 figures)",
    )
    trace: str | None = _setting(
        None, "write one iteration's forwards and backwards on every rank there, for ui.perfetto.dev (path)"
    )
    trace_iteration: int = _setting(
        10, "the iteration that --wlb-trace shows, 2 or later (iteration)", type=int, within=(1, LARGEST)
    )
    off: bool = _setting(False, "leave Megatron untouched: the launcher then only runs the script")
