"""One dataclass holds every setting of the plugin; arguments.py makes the --wlb-* flags from it.

Numbers that flags take have bounds: NaN and infinity, which pass most comparisons, are refused like what is too large.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from wlb_megatron.registry import CP_MODES, KERNELS, PACKERS, SHARDINGS, choices, packer_entry

Number = TypeVar("Number", int, float)

TOKENS = 1 << 30
"""The most tokens of a window or micro-batch: its square, the work of attention, must fit a 64-bit integer."""
RANKS = 1 << 16
COUNT = 1 << 20
SEED = (1 << 31) - 1
SECONDS = 1e7
LARGEST = 1e30
"""The largest rate or cost."""


def whole(low: int, high: int = COUNT) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""
    return _within(int, "a whole number", low, high)


def real(low: float, high: float = LARGEST) -> Callable[[str], float]:
    """An argparse type: a number from `low` to `high`, never NaN."""
    return _within(float, "a number", low, high)


def _within(number: Callable[[str], Number], kind: str, low: float, high: float) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        with suppress(ValueError):
            value = number(text)
            if low <= value <= high:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind} from {low} to {high}")

    return read


OVERLONG = ("split", "truncate", "drop", "chunk")


def _setting(default: Any, help: str, **meta: Any) -> Any:
    return field(default=default, metadata={"help": help, **meta})


def _of_training(default: Any, help: str, **meta: Any) -> Any:
    """A setting that matters in training alone: the commands do not take it."""
    return _setting(default, help, training=True, **meta)


@dataclass(frozen=True, kw_only=True)
class WlbConfig:
    """Settings of the plugin. Field `max_tokens` is flag --wlb-max-tokens, and so on."""

    packing: str = _setting(
        "varlen",
        f"how documents become micro-batches: {choices(PACKERS)}",
        choices=PACKERS,
    )
    sharding: str = _setting(
        "adaptive",
        f"how a micro-batch is divided over context-parallel ranks: {choices(SHARDINGS)}",
        choices=SHARDINGS,
    )
    max_tokens: int | None = _setting(
        None,
        "longest micro-batch, Lmax (tokens; default: 1.5 x --seq-length, 0.75 x with chunks, or less if the GPU's "
        "memory, with a tenth to spare, holds less)",
        type=whole(1, TOKENS),
    )
    micro_batches_per_window: str = _setting(
        "auto",
        "micro-batches for each window that a data-parallel rank trains: auto (in each iteration the number with the "
        "shortest predicted step; 1 without a pipeline), or a number from 1, such as 2 or 1.5",
    )
    micro_batch_cost: float | None = _setting(
        None,
        "fixed cost of a micro-batch (tokens of linear work; default: from the profile or the model's shape, else "
        "1000 x the context-parallel size)",
        type=real(0, TOKENS),
    )
    chunks: str = _setting(
        "auto",
        "train a long document in chunks, in consecutive micro-batches of one iteration: auto (if that is predicted "
        "faster and the other flags allow it), on, off. With chunks no document is delayed",
        choices=("auto", "off", "on"),
    )
    max_delay: int | None = _setting(
        None,
        "longest wait of a document after it arrived (iterations; default: 16, or 0 with chunks). A number above 0 "
        "leaves chunks off",
        type=whole(0, COUNT),
    )
    thresholds: str = _setting(
        "auto",
        "shortest documents of each outlier queue, in which long documents wait: auto (chosen on a sample of the "
        "index), none (no document waits), or lengths such as 49152,90112 (tokens). Not used with chunks",
    )
    batch_spread: str = _setting(
        "auto",
        "most tokens of a step over those of a global batch: auto (1.5 in a new run; a checkpoint's run keeps its own, "
        "and has none if it began before this flag), none, or a number from 1. Documents that must train by "
        "--wlb-max-delay, and those in chunks, may exceed it; the log counts such steps. In simulation 1.5 costs up to "
        "half a percent of the tokens a second, and 1.25 one percent, where whole documents wait",
    )
    cp_mode: str = _setting(
        "fixed",
        f"ranks that share a micro-batch: {choices(CP_MODES)}",
        choices=CP_MODES,
    )
    quadratic_at: float | None = _setting(
        None,
        "length X at which a document's attention costs as much as everything else. A document of d tokens has work "
        "d + d*d/X (tokens; default: from the profile or the model's shape)",
        type=real(1, LARGEST),
    )
    document_cost: float | None = _setting(
        None,
        "fixed cost of a document in a micro-batch (tokens of linear work; default on GPUs: from the profile, or the "
        "model's shape and a built-in table of an H100's kernels; else 0)",
        type=real(0, TOKENS),
    )
    max_documents: int = _setting(
        4096,
        "most documents in a micro-batch, because each adds to the time of the attention kernels (documents)",
        type=whole(1, COUNT),
    )
    token_weights: str = _of_training(
        "auto",
        "weight of a token's loss in the gradient: step (1 over the tokens of its own step, as Megatron has it: tokens "
        "of fuller steps weigh less), equal (1 over --global-batch-size x --seq-length, the same in every step), auto "
        "(equal where documents may wait, which then train in fuller steps; else step). A resumed run keeps what it "
        "began with",
        choices=("auto", "step", "equal"),
    )
    overlong: str = _setting(
        "split",
        "what happens to a document longer than --seq-length: split (into pieces of that length), truncate (to that "
        "length), drop (counted in the log), chunk (it trains whole, in chunks of one iteration). With chunk it is "
        "split at the length that memory, --max-position-embeddings and a data-parallel rank's share of the iteration "
        "allow. With --sft, a conversation is never split: chunk is the default where chunks run, else drop",
        choices=OVERLONG,
    )
    train_epochs: int | None = _of_training(
        None,
        "train until each document has trained so often; sets --train-samples, and the last step takes what is left "
        "(epochs; default: --train-iters or --train-samples)",
        type=whole(1, COUNT),
    )
    sft_skip_bad_lines: bool = _of_training(
        False,
        "with --sft, leave out lines of a jsonl that cannot be trained, and count them (default: they end the job and "
        "are listed)",
    )
    sft_drop_tools: bool = _of_training(
        False,
        "with --sft, accept tools, their turns and calls, which the nemotron formats leave out (default: such a line "
        "is bad)",
    )
    sft_assistant_only: bool = _of_training(
        False,
        "with --sft and --sft-tokenizer-prompt-format default, train only what the chat template marks by "
        "its generation tags (default: every token, as in Megatron)",
    )
    sft_mask_data: bool = _of_training(
        False,
        "with --sft, --data-path names .bin/.idx pairs, each with a .mask of one byte a token: 1 for a token that is "
        "trained (default: it names jsonls)",
    )
    kernels: str = _of_training(
        "auto",
        f"attention kernels on GPUs: {choices(KERNELS)}, auto (for each layer the first of these that is installed and "
        "supports it)",
        choices=("auto", *KERNELS),
    )
    regather_keys: bool = _setting(
        False,
        "exchange keys and values again in backward instead of keeping them: saves memory, costs one more exchange a "
        "layer (default: keep them)",
    )
    recompute: str = _setting(
        "auto",
        "what --recompute-granularity full recomputes: auto (in each step, of each micro-batch, as few layers as fit "
        "the GPU's memory, never more than Megatron's flags say), off (Megatron's flags in every step)",
        choices=("auto", "off"),
    )
    memory_margin: float = _setting(
        0.10,
        "share of a GPU's memory that plans leave free: Lmax where it follows from memory, and the layers that are "
        "kept (share, 0 to 0.9)",
        type=real(0, 0.9),
    )
    gpu_memory: float | None = _setting(
        None,
        "memory of a GPU, from which Lmax and the layers that are kept follow (GiB; default in training: the GPU's, or "
        "the cap that torch was given; in commands: Lmax is 1.5 windows, and 80 GiB decide what fits)",
        type=real(0.001, COUNT),
    )
    rehearsal: str = _of_training(
        "auto",
        "run a forward and backward of micro-batches of Lmax tokens before step 1, so that memory runs out there if it "
        "ever does: auto (on GPUs), always, never",
        choices=("auto", "always", "never"),
    )
    plan_process: str = _of_training(
        "auto",
        "plan in a separate process of each rank, so that planning does not delay kernel launches: auto (from about "
        "1,000 documents an iteration on, unless --wlb-cp-mode is dynamic), always, never (a thread plans)",
        choices=("auto", "always", "never"),
    )
    fresh_order: bool = _of_training(
        False,
        "continue a checkpoint with other corpora, weights, --seq-length or packing, or one made without the plugin. "
        "Waiting documents train first, known corpora continue where they were, new ones begin. With another --seed, "
        "--seq-length or --wlb-overlong, or if nothing else changed, every corpus begins an epoch. A job that is "
        "queued again with the flag continues that order, so it may be given at any start (default: such a checkpoint "
        "is refused)",
    )
    replace_script_functions: bool = _of_training(
        False,
        "replace the script's own forward step and dataset provider, and a loss function that the plugin cannot call, "
        "though they do more than Megatron's (default: such a script is refused)",
    )
    log: str | None = _of_training(
        None, "append one JSON line for each trained iteration to this file (path; default: no file)"
    )
    log_plans: bool = _of_training(
        False,
        "add the document lengths of every micro-batch to the lines of --wlb-log (about 1 KB for 200 documents)",
    )
    profile: str | None = _of_training(
        None,
        "profile of this model on this GPU, made by wlb-megatron profile, with which iterations are planned, sharded "
        "and predicted (path; default: the model's shape and built-in kernel tables)",
    )
    trace: str | None = _of_training(
        None,
        "write one iteration's forwards and backwards on every rank to this file, for ui.perfetto.dev (path; default: "
        "no file)",
    )
    trace_iteration: int = _of_training(
        10,
        "the iteration to trace, 2 or later, because the first builds kernels (iteration)",
        type=whole(2, COUNT),
    )
    dry_run: bool = _of_training(
        False,
        "check the flags as for --wlb-world-size GPUs, in one process and without a GPU. Print what is set, "
        "planned and predicted. Exit with 0, or with 2 and the line of a refusal (default: train)",
    )
    world_size: int | None = _of_training(
        None, "GPUs of the job of --wlb-dry-run (count; default: the launcher's)", type=whole(1, RANKS)
    )
    off: bool = _of_training(False, "leave Megatron unchanged: the launcher only runs the script")

    @property
    def fixed_windows(self) -> bool:
        """Whether each micro-batch is one window of --seq-length, as the packer's entry says."""
        return packer_entry(self.packing).fixed_windows
