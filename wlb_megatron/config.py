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
        "(balanced windows), fixed-solver (the same by an exact solver, in planning commands alone), varlen (of "
        "variable length)",
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
        "longest micro-batch, Lmax (tokens; default: 1.5 x --seq-length, or less where the GPU's memory, with a tenth "
        "to spare, does not allow it)",
        type=int,
        within=(1, TOKENS),
    )
    micro_batches_per_window: str = _setting(
        "auto",
        "micro-batches of a data-parallel rank for each window it trains: auto (in each iteration the number whose "
        "step is predicted shortest; 1 without a pipeline), or a number from 1, such as 2 or 1.5",
    )
    micro_batch_cost: float | None = _setting(
        None,
        "fixed cost of one more micro-batch, in tokens of linear work (tokens; default: from the profile or the "
        "model's shape, 1000 x context-parallel size where neither is known)",
        type=float,
        within=(0, TOKENS),
    )
    chunks: str = _setting(
        "auto",
        "train long documents in chunks, in several micro-batches of one iteration: auto (if that is predicted faster "
        "and the other flags allow it), on, off. With chunks no document is delayed",
        choices=("auto", "off", "on"),
    )
    max_delay: int | None = _setting(
        None,
        "a document trains at most this many iterations after it arrived (iterations; default: 16, with chunks 0). A "
        "number above 0 leaves chunks off",
        type=int,
        within=(0, COUNT),
    )
    thresholds: str = _setting(
        "auto",
        "lengths from which a document waits in an outlier queue: auto, none, or e.g. 49152,90112 (tokens). With "
        "chunks nothing waits",
    )
    release: str = _setting(
        "balance",
        "when an outlier queue releases documents: balance (as many as balance this iteration best; waiting has a "
        "price), full (one for each micro-batch once it holds that many, as in the WLB-LLM paper)",
        choices=RELEASES,
    )
    balance_batches: int = _setting(
        1,
        "fixed-greedy (and fixed-solver) balance over this many global batches (iterations)",
        type=int,
        within=(1, COUNT),
    )
    cp_mode: str = _setting(
        "fixed",
        "which ranks share a micro-batch: fixed (groups of --context-parallel-size), dynamic (in each step groups of "
        "different sizes over the data x context parallel ranks, planned by predicted time)",
        choices=("fixed", "dynamic"),
    )
    solver_seconds: float = _setting(
        1.0,
        "time limit for one plan of dynamic groups, or of fixed-solver (seconds)",
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
        "fixed cost of a document in a micro-batch, in tokens of linear work (tokens; default: from the model's shape "
        "and a built-in H100 kernel table on GPUs, else 0)",
        type=float,
        within=(0, TOKENS),
    )
    max_documents: int = _setting(
        4096,
        "most documents in a micro-batch; attention kernels launch one row of blocks for each (documents)",
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
        "attention kernels on GPUs: cudnn (through Transformer Engine), fa4 (FlashAttention-4, the extra fa4), auto "
        "(fa4 for the layers that it supports, if it is installed, else cudnn)",
        choices=KERNELS,
    )
    regather_keys: bool = _setting(
        False,
        "exchange keys again in backward instead of keeping them: less memory, one more exchange a layer",
    )
    rehearsal: str = _setting(
        "auto",
        "before step 1, run a forward and backward of micro-batches of Lmax tokens, which need as much memory as any "
        "step can: auto (on GPUs), always, never",
        choices=("auto", "always", "never"),
    )
    plan_process: str = _setting(
        "auto",
        "plan iterations in a process of its own on each rank, so that planning does not hold up the Python that "
        "launches kernels: auto (from about 1,000 documents an iteration on, where packing and groups allow it), "
        "always, never (a thread)",
        choices=("auto", "always", "never"),
    )
    graph_seconds: float = _setting(
        60.0,
        "time limit for building cuDNN's attention graphs before step 1, likeliest sizes first; a step that needs "
        "another graph builds it, in about 0.13 s (seconds)",
        type=float,
        within=(0, SECONDS),
    )
    fresh_order: bool = _setting(
        False,
        "continue a checkpoint with other corpora, weights, --seq-length or packing, or one made without the plugin. "
        "Documents that wait train first, known corpora continue where they were, new ones begin. With another --seed, "
        "or nothing else changed, all begin an epoch. A job that is queued again with the flag continues that order",
    )
    log: str | None = _setting(None, "append one JSON line per trained iteration to this file (path)")
    log_plans: bool = _setting(
        False,
        "add the document lengths of every micro-batch to the lines of --wlb-log (about 1 KB for 200 documents)",
    )
    profile: str | None = _setting(
        None,
        "plan, choose shardings and predict iterations with this profile of this model on this GPU, made by "
        "wlb-megatron profile (path; default: the model's shape and built-in figures)",
    )
    trace: str | None = _setting(
        None,
        "write one iteration's forwards and backwards on every rank to this file, for ui.perfetto.dev (path)",
    )
    trace_iteration: int = _setting(
        10, "the iteration to trace, 2 or later (iteration)", type=int, within=(1, LARGEST)
    )
    off: bool = _setting(False, "leave Megatron as it is: the launcher then only runs the script")
