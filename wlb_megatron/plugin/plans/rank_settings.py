"""How this rank cuts, holds and reads micro-batches: from the job, and its places among Megatron's groups of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.utils.data import DataLoader

from wlb_megatron.documents.blend import predictions_in
from wlb_megatron.plan import Piece
from wlb_megatron.plugin.flags.limits import cost_model, recompute_memory
from wlb_megatron.plugin.logs.prediction import in_arrival_order, predictor
from wlb_megatron.plugin.micro_batches.loaded import Layout, LoadedMicroBatch
from wlb_megatron.plugin.micro_batches.planning import ShardSettings, nothing_counted
from wlb_megatron.plugin.plans.agreement import shared_gpu
from wlb_megatron.plugin.plans.data import MicroBatchSampler, make_loader, read_ahead
from wlb_megatron.plugin.plans.source import Source
from wlb_megatron.workload.kernel_table import h100, of_gpu


def reporting(settings: ShardSettings, source: Source) -> ShardSettings:
    """On the rank that logs: with the prediction of each iteration's time, as planned and in arrival order."""
    from megatron.training.utils import is_last_rank

    job = source.job
    if not is_last_rank():
        return settings
    if job.profile is None and not job.device.on_gpu:
        return settings  # the built-in figures are a GPU's
    predict = predictor(
        *(job, settings.dp_rank, settings.alignment),
        in_step=settings.in_step,
        memory=recompute_memory(job),
        table=settings.table,
    )
    settings = replace(settings, predict=predict)
    return replace(
        settings, arrival_order=partial(in_arrival_order, settings, cost_model(job), job.sizes.data)
    )


def _predictions(source: Source) -> Callable[[Sequence[Piece]], tuple[int, ...]]:
    """Counts an iteration's predictions by depth, where losses are scaled by them: multi-token prediction, fp16. Or
    where the log counts them: with masks."""
    model = source.job.model
    depths, counts = model.depths, model.dtype == "float16" or source.corpus.masked
    return partial(predictions_in, source.corpus, depths) if depths or counts else nothing_counted


def shard_settings(source: Source) -> ShardSettings:
    from megatron.core import parallel_state

    job, model, tp = source.job, source.job.model, source.job.sizes.tensor
    kernels, _ = job.kernels()
    if job.costs is not None:
        table = job.costs.table
    elif job.device.on_gpu:
        table = of_gpu(shared_gpu(torch.cuda.get_device_name(job.device.index)), kernels)
    else:
        table = h100()
    if kernels == "cudnn":
        table = replace(table, backend=kernels)  # whoever's times: its graphs bound what one call may hold
    heads = {"heads": model.shape.heads // tp, "kv_heads": max(1, model.shape.kv_heads // tp)}
    return ShardSettings(
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_size=job.sizes.context,
        alignment=job.alignment,
        sharding=source.config.sharding,
        in_step=job.trainer.in_step,
        keeps_layers=recompute_memory(job) is not None,
        table=table.scaled(**heads, head_dim=model.shape.head_dim),
        predictions=_predictions(source),
    )


def rank_layout(source: Source) -> Layout:
    from megatron.core import parallel_state

    model, sizes = source.job.model, source.job.sizes
    return Layout(
        cp_rank=parallel_state.get_context_parallel_rank(),
        activation_divisor=sizes.tensor if sizes.sequence else 1,
        hidden_size=model.shape.hidden,
        reads_tokens=parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        window=model.window,
        stage_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        cp_size=sizes.context,
        routes=model.shape.experts is not None,
        follows=model.depths,
        vocabulary=model.vocabulary,
        gathers=model.shape.delta_nets is not None,
        by_document=model.shape.experts is not None and "seq_aux_loss" in source.job.trainer.balancing,
    )


def rank_loader(source: Source, sampler: MicroBatchSampler, layout: Layout) -> DataLoader[LoadedMicroBatch]:
    job = source.job
    return make_loader(
        source.corpus,
        sampler,
        layout,
        workers=job.workers,
        prefetched=read_ahead(source.micro_batches, source.most_micro_batches),
        pin_memory=job.device.on_gpu,
        ignored_signal=job.ignored_signal,
    )
