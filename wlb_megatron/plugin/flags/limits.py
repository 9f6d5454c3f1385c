"""Lmax against the GPU's memory: the model and layout of Megatron's arguments as workload.memory counts them."""

from __future__ import annotations

import sys
from typing import Any

import torch

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.whole_documents import Bound
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunks.choose_chunks import chunk_capacity
from wlb_megatron.packing.memory_limits import GpuMemory, with_lmax
from wlb_megatron.plugin.flags.batch_sizes import BatchSizes
from wlb_megatron.plugin.flags.chunk_limits import chunks_refused
from wlb_megatron.plugin.flags.model_shape import attention_shape
from wlb_megatron.plugin.flags.parallel_sizes import ParallelSizes
from wlb_megatron.workload.chunk_memory import fit_document, keys_bytes
from wlb_megatron.workload.memory import ParallelLayout, StageShape

LARGE_VOCABULARY = 131072
"""Assumed where only the tokenizer knows, which is built after the flags are checked."""


def fit_to_memory(args: Any, config: WlbConfig, alignment: int) -> WlbConfig:
    """The settings with Lmax filled in, see memory_limits.with_lmax. The same on every rank of like GPUs, and
    independent of the layout wherever memory suffices."""
    if config.max_tokens is not None:
        return config
    return with_lmax(
        config, gpu_memory(args, alignment), BatchSizes.of(args).joined_window, chunks_refused(args)
    )


def gpu_memory(args: Any, alignment: int) -> GpuMemory | None:
    """None where memory is not looked at: without a GPU, or with experts (how many tokens one gets is not known
    ahead)."""
    if not _known(args):
        return None
    return GpuMemory(_memory(args), *model_and_layout(args), BatchSizes.of(args).joined_window, alignment)


def fitting_tokens(args: Any, alignment: int) -> int | None:
    """The longest micro-batch of whole documents that fits the GPU's memory; None where that is not looked at."""
    memory = gpu_memory(args, alignment)
    return None if memory is None else memory.whole()


def _known(args: Any) -> bool:
    return args.distributed_backend == "nccl" and not args.num_experts


def document_memory(args: Any, config: WlbConfig, alignment: int) -> Bound | None:
    """What memory allows a document that trains whole in chunks. None where memory is not looked at."""
    if not _known(args):
        return None
    shape, layout = model_and_layout(args)
    window = BatchSizes.of(args).joined_window
    fitting = fit_document(
        *(shape, layout, _memory(args)),
        longest=chunk_capacity(window, config.max_tokens, alignment),
        share=layout.micro_batches * window,
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


def model_and_layout(args: Any) -> tuple[StageShape, ParallelLayout]:
    """Megatron's validated arguments in workload.memory's terms."""
    heads, groups, channels = attention_shape(args)
    sizes, batches = ParallelSizes.of(args), BatchSizes.of(args)
    further = getattr(args, "mtp_num_layers", None) or 0
    shape = StageShape(
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
    count = batches.schedule.largest // (sizes.data * batches.each)
    multiple = sizes.micro_step_multiple
    layout = ParallelLayout(
        tensor=sizes.tensor,
        context=sizes.context,
        pipeline=sizes.pipeline,
        data=sizes.data,
        virtual=sizes.virtual,
        group=sizes.group or 1,
        micro_batches=-(-count // multiple) * multiple,
        sequence=sizes.sequence,
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
