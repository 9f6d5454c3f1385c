"""Lmax against the GPU's memory: the model and layout of Megatron's arguments as workload.memory counts them."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.choose_chunks import chunk_capacity, holds_whole
from wlb_megatron.packing.chunk_packer import held
from wlb_megatron.packing.whole_documents import Bound
from wlb_megatron.plugin.batch_sizes import batch_schedule, micro_step_multiple
from wlb_megatron.plugin.chunk_limits import chunks_refused
from wlb_megatron.workload.chunk_memory import chunked_bytes, fit_chunks, fit_document, keys_bytes
from wlb_megatron.workload.memory import GIB, ModelShape, ParallelLayout, fit_max_tokens, memory_needed

LARGE_VOCABULARY = 131072
"""Assumed where only the tokenizer knows, which is built after the flags are checked."""


def fit_to_memory(args: Any, config: WlbConfig, alignment: int) -> WlbConfig:
    """The settings with Lmax filled in: 1.5 windows, or what fits the GPU's memory if that is less.

    A value given by flag stays. Where not even 1.25 windows fit, micro-batches are shorter and documents train in
    chunks, if they can; else WlbError. The same on every rank of like GPUs, and independent of the layout wherever
    memory suffices.
    """
    if config.max_tokens is not None:
        return config
    try:
        fitting = fitting_tokens(args, alignment)
    except WlbError:
        shorter = 0 if _whole_alone(args, config) else fitting_chunks(args, alignment)
        if shorter * LEAST_CHUNK < args.seq_length:
            raise
        return replace(config, max_tokens=shorter)
    usual = 3 * args.seq_length // 2
    return replace(config, max_tokens=usual if fitting is None else min(usual, fitting))


LEAST_CHUNK = 8
"""A micro-batch with chunks has at least a window over this, by which fixed costs of kernels and hosts stay small."""


def _whole_alone(args: Any, config: WlbConfig) -> bool:
    off = config.chunks == "off" or config.packing != "varlen" or config.release == "full"
    return off or config.cp_mode == "dynamic" or bool(chunks_refused(args))


def fitting_tokens(args: Any, alignment: int) -> int | None:
    """The longest micro-batch that fits the GPU's memory. None where memory is not looked at: without a GPU, or with
    experts (how many tokens one gets is not known ahead)."""
    if not _known(args):
        return None
    return fit_max_tokens(*model_and_layout(args), _memory(args), window=args.seq_length, alignment=alignment)


def fitting_chunks(args: Any, alignment: int) -> int:
    """The same with documents in chunks, none above the window; at most what a plan with chunks makes use of."""
    shape, layout = model_and_layout(args)
    window = args.seq_length
    flying = held(window, layout.micro_batches, layout.pipeline)
    fitting = fit_chunks(*(shape, layout, _memory(args)), held=flying, document=window, alignment=alignment)
    return min(fitting, chunk_capacity(window, None, alignment))


def chunks_memory(args: Any, config: WlbConfig, alignment: int, longest: int) -> tuple[int, int] | None:
    """Bytes that the fullest GPU needs at most with documents of up to `longest` tokens in chunks, and with whole ones
    at the settings' Lmax (0: these are not trained). None where memory is not looked at."""
    if not _known(args):
        return None
    shape, layout = model_and_layout(args)
    window = args.seq_length
    chunked = chunked_bytes(
        *(shape, layout),
        longest=chunk_capacity(window, config.max_tokens, alignment),
        held=held(window, layout.micro_batches, layout.pipeline, longest),
        document=max(window, longest),
    )
    whole = holds_whole(config, window, alignment) and config.max_tokens
    return chunked, memory_needed(shape, layout, whole) if whole else 0


def no_memory_for_chunks(args: Any, config: WlbConfig, alignment: int) -> list[tuple[str, str]]:
    """A row as of chunks_refused where whole documents fit the GPU's memory and chunks are predicted not to: many
    key heads under full recompute, whose keys are more than the activations that are kept."""
    needed = chunks_memory(args, config, alignment, args.seq_length)
    if config.chunks != "auto" or config.overlong == "chunk" or needed is None or not needed[1]:
        return []
    if needed[0] <= max(needed[1], 0.9 * _memory(args)):
        return []
    told = f"{_memory(args) // GIB} GiB of memory, where chunks need {needed[0] / GIB:.1f}"
    return [(told, "use fewer key heads (--num-query-groups) or more tensor-parallel ranks")]


def told_of_chunks(args: Any, config: WlbConfig, alignment: int, longest: int) -> list[str]:
    """What a run with chunks tells of its memory at start; nothing where memory is not looked at."""
    needed = chunks_memory(args, config, alignment, longest)
    if needed is None:
        return []
    chunked, whole = (each / GIB for each in needed)
    freed = (
        f"{whole:.1f} with whole documents in micro-batches of {config.max_tokens:,} tokens, "
        f"so chunks {'free' if chunked < whole else 'add'} {abs(whole - chunked):.1f}"
        if whole
        else "whole documents do not fit"
    )
    return [f"memory of the fullest GPU, at most: {chunked:.1f} GiB; {freed}"]


def _known(args: Any) -> bool:
    return args.distributed_backend == "nccl" and not args.num_experts


def document_memory(args: Any, config: WlbConfig, alignment: int) -> Bound | None:
    """What memory allows a document that trains whole in chunks. None where memory is not looked at."""
    if not _known(args):
        return None
    shape, layout = model_and_layout(args)
    fitting = fit_document(
        *(shape, layout, _memory(args)),
        longest=chunk_capacity(args.seq_length, config.max_tokens, alignment),
        share=layout.micro_batches * args.seq_length,
    )
    each = keys_bytes(shape, layout) / layout.context / 1024
    return Bound(fitting, f"memory (keys and their gradients take {each:,.1f} KiB a token of each GPU)")


def _memory(args: Any) -> int:
    return whole_gib(torch.cuda.get_device_properties(args.local_rank).total_memory)


def whole_gib(total: int) -> int:
    """Bytes rounded down to a GiB: drivers differ by some MiB in what they keep of a like card, and one Lmax must come
    out on every rank. 84,929,413,120 and 64 MiB less are both 79 GiB."""
    return total >> 30 << 30


def adoptable_tokens(args: Any, alignment: int) -> int:
    """Up to which a saved run's Lmax may serve this one: 0 where a flag sets it, else what fits."""
    if args.wlb_max_tokens is not None:
        return 0
    try:
        fitting = fitting_tokens(args, alignment)
    except WlbError:  # whole documents do not fit; with chunks a state brings no Lmax
        return 0
    return sys.maxsize if fitting is None else fitting


def model_and_layout(args: Any) -> tuple[ModelShape, ParallelLayout]:
    """Megatron's validated arguments in workload.memory's terms."""
    from wlb_megatron.plugin.source import attention_shape

    heads, groups, channels = attention_shape(args)
    pipeline, further = args.pipeline_model_parallel_size, getattr(args, "mtp_num_layers", None) or 0
    shape = ModelShape(
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        layers=_fullest_stage(args) + further,  # of multi-token prediction, on the last stage
        heads=heads,
        kv_heads=groups,
        head_dim=channels,
        vocab=args.padded_vocab_size or args.vocab_size or LARGE_VOCABULARY,  # the tokenizer is built later
        gated=args.swiglu,
        tied=not args.untie_embeddings_and_output_weights,
        dropout=args.hidden_dropout > 0,
        dtype_bytes=2 if args.bf16 or args.fp16 else 4,
        losses=1 + further,
    )
    windows, multiple = batch_schedule(args).largest // args.data_parallel_size, micro_step_multiple(args)
    layout = ParallelLayout(
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        pipeline=pipeline,
        data=args.data_parallel_size,
        virtual=getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
        group=getattr(args, "microbatch_group_size_per_vp_stage", None) or 1,
        micro_batches=-(-windows // multiple) * multiple,
        sequence=args.sequence_parallel,
        distributed_optimizer=args.use_distributed_optimizer,
        recompute=args.recompute_granularity or "none",
        recompute_layers=args.recompute_num_layers or 1,
        recompute_block=args.recompute_method == "block",
        keep_keys=not args.wlb_regather_keys,
    )
    return shape, layout


def _fullest_stage(args: Any) -> int:
    """Layers of the pipeline stage that has most, its virtual stages together."""
    stages = args.pipeline_model_parallel_size
    placed = getattr(args, "pipeline_model_parallel_layout", None)
    if placed is not None:
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        if isinstance(placed, str):
            placed = PipelineParallelLayerLayout.from_str(placed, stages)
        return max(sum(chunk.count(LayerType.decoder) for chunk in stage) for stage in placed.layout)
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    given = [layers for layers in (getattr(args, end, None) for end in ends) if layers is not None]
    counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    rest = args.num_layers - sum(given) + sum(bool(getattr(args, layer, False)) for layer in counted)
    return max([*given, -(-rest // max(1, stages - len(given)))])
