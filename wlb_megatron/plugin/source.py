"""From Megatron's arguments to a planner over the corpus: opened at start, before a GPU allocates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.blend import Blend, parse_blend
from wlb_megatron.packing.corpus import Corpus, Rules
from wlb_megatron.packing.documents import DocumentStream
from wlb_megatron.packing.packer import make_packer
from wlb_megatron.packing.planner import Planner
from wlb_megatron.workload.cost_model import CostModel, quadratic_at


@dataclass(frozen=True)
class Source:
    """The training corpus and the planner over it."""

    corpus: Blend
    planner: Planner
    config: WlbConfig
    micro_batches: int


def open_source(args: Any, config: WlbConfig) -> Source:
    """Read the index, make the packer. WlbError with one line for whatever is wrong with the data or settings."""
    window, dp = args.seq_length, args.data_parallel_size
    if args.global_batch_size % dp:
        raise WlbError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of the data-parallel size {dp}; "
            "change one of them"
        )
    micro_batches = args.global_batch_size // dp
    corpus = _training_blend(args)
    rules = Rules(window=window, overlong=config.overlong, seed=args.seed, endless=True)
    stream = DocumentStream(_corpora(args, corpus), rules)
    packer = make_packer(
        config,
        CostModel(_known(config.quadratic_at), config.document_cost),
        window=window,
        micro_batches=micro_batches,
        dp=dp,
        pp=args.pipeline_model_parallel_size,
        alignment=token_alignment(args),
    )
    return Source(
        corpus, Planner(stream, packer, global_tokens=args.global_batch_size * window), config, micro_batches
    )


def complete(args: Any, config: WlbConfig) -> WlbConfig:
    """The settings with what the user left to the model's shape filled in."""
    if config.quadratic_at is not None:
        return config
    heads = args.num_attention_heads
    channels = args.kv_channels or args.hidden_size // heads
    groups = args.num_query_groups if args.group_query_attention else heads
    ffn = args.ffn_hidden_size
    if args.num_experts:
        ffn = (args.moe_ffn_hidden_size or ffn) * args.moe_router_topk
    return replace(
        config,
        quadratic_at=quadratic_at(
            args.hidden_size, heads * channels, groups * channels, ffn, gated=args.swiglu
        ),
    )


def token_alignment(args: Any) -> int:
    """A micro-batch's tokens are a multiple of this: equal shares for CP ranks, and for TP under sequence parallel."""
    return int(args.context_parallel_size * args.tensor_model_parallel_size)


def _training_blend(args: Any) -> Blend:
    """The corpora of Megatron's --data-path, --data-args-path or --train-data-path."""
    if args.per_split_data_args_path is not None:
        raise WlbError("--per-split-data-args-path is not handled yet; give --train-data-path")
    values = args.data_path or args.train_data_path
    if args.data_args_path is not None:
        try:
            with open(args.data_args_path, encoding="utf-8") as listed:
                values = listed.read().split()
        except OSError as error:
            raise WlbError(f"cannot read --data-args-path {args.data_args_path}: {error.strerror}") from None
    return Blend(*parse_blend(values or []))


def _corpora(args: Any, blend: Blend) -> list[Corpus]:
    """The training part of each corpus by --split (all of it without --split, or with per-split paths)."""
    split = None if args.train_data_path else args.split
    return blend.corpora(split, "train")


def _known(value: float | None) -> float:
    assert value is not None
    return value
