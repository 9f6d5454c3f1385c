"""The dataset provider that Megatron calls on every rank, and training's iterator: plans made ahead, and what follows
each step. How this rank cuts, holds and reads micro-batches: by the job, and its places among Megatron's groups."""

from __future__ import annotations

import atexit
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.training import get_args, print_rank_0
from megatron.training.utils import is_last_rank

from wlb_megatron.documents.blend import predictions_in
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.carry import began_otherwise, saved_choices, weighs_equally
from wlb_megatron.plugin import stores
from wlb_megatron.plugin.flags.limits import cost_model, recompute_memory
from wlb_megatron.plugin.flags.refusal_printing import checked
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.logs import metrics, timers, trace
from wlb_megatron.plugin.logs.flops import count_segments
from wlb_megatron.plugin.logs.prediction import in_arrival_order, predictor
from wlb_megatron.plugin.megatron_trial import try_megatron
from wlb_megatron.plugin.micro_batches.iterators import (
    MicroBatchIterator,
    MicroBatchSampler,
    WholeSetIterator,
    make_loader,
    over_and_over,
)
from wlb_megatron.plugin.micro_batches.loaded import Layout, LoadedMicroBatch
from wlb_megatron.plugin.micro_batches.planning import (
    PlanAhead,
    PlannedIteration,
    ShardSettings,
    in_a_process,
    nothing_counted,
    plan_in_a_process,
    plan_iterations,
)
from wlb_megatron.plugin.plans.agreement import PlanAgreement, shared_gpu
from wlb_megatron.plugin.plans.dynamic import training_plans
from wlb_megatron.plugin.plans.resume import LoadedAt, PackingStates, remember, restore
from wlb_megatron.plugin.plans.source import Source, first_lines, open_part
from wlb_megatron.plugin.step import recomputation
from wlb_megatron.plugin.step.rehearsal import longest_micro_batches
from wlb_megatron.refusals import Refused
from wlb_megatron.sharding.slots import padding
from wlb_megatron.workload.kernel_table import h100, of_gpu


def make_provider(sources: dict[str, Source]) -> Callable[..., tuple[Any, Any, Any]]:
    """train_valid_test_datasets_provider over the plans of the job's sources.

    Asked for each model chunk of a virtual pipeline, it gives the same iterators: micro-batches are drawn once a step.
    """
    iterators: list[tuple[Any, Any, Any]] = []

    def provider(train_valid_test_num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        if vp_stage:
            return iterators[0]
        args = get_args()
        for name, source in sources.items():
            sources[name] = replace(source, job=source.job.with_vocabulary(args.padded_vocab_size))
        try_megatron()
        lines: list[str] = []
        if "train" in sources:  # else --skip-train
            loaded_at = LoadedAt(args.iteration, args.consumed_train_samples)
            if loaded_at.begun:
                sources["train"] = _as_it_began(sources["train"])
            sources["train"], lines = restore(sources["train"], loaded_at)
        first = next(iter(sources.values()))
        lines += first_lines(first, shard_settings(first).table.backend, args.train_iters)
        for line in lines:
            print_rank_0(f"> wlb_megatron: {line}")
        agreement = _agree(sources)
        # Training last: its planning thread must not hold a lock while evaluation's workers are forked.
        valid: Any = [_evaluation(sources[name]) for name in sources if name.startswith("valid")]
        if not first.job.evaluation.each_set:
            valid = valid[0] if valid else None
        test = _evaluation(sources["test"]) if "test" in sources else None
        train = training_iterator(sources["train"], agreement) if "train" in sources else None
        iterators[:] = [(train, valid, test)]
        return iterators[0]

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


def _as_it_began(source: Source) -> Source:
    """The same documents, in chunks or whole as the checkpoint's run packs them."""
    saved = saved_choices(part(PackingStates).loaded_state)
    config = began_otherwise(source.config, source.planner.packer, saved)
    if config is None:
        return source
    try:
        job = source.job.with_config(config)
        reopened = open_part(job, "train", job.batches.schedule)
    except WlbError as error:  # a flag or the layout forbids it now
        reason = f"documents do not train in chunks or whole as the run began: {error}"
        return replace(source, messages=(*source.messages, reason))
    assert reopened is not None  # it has been opened before
    now, stays = (
        ("no", "documents train in chunks, as the run began; --wlb-chunks off keeps them whole")
        if saved["chunks"]
        else ("yes", "documents stay whole, as the run began; --wlb-chunks on takes chunks")
    )
    messages = tuple(line.replace(f"documents in chunks: {now}", stays) for line in source.messages)
    return replace(reopened, job=source.job, messages=messages)


def _agree(sources: dict[str, Source]) -> PlanAgreement:
    """Compare what decides all plans to come, of every part."""
    agreement, first = PlanAgreement(), next(iter(sources.values()))
    settings = shard_settings(first)
    states = [json.dumps(source.planner.state(), sort_keys=True) for source in sources.values()]
    decisive = settings.table.to_json(), settings.sharding, first.config.cp_mode, first.job.kernels()
    agreement.begin(*decisive, *states)
    return agreement


def _evaluation(source: Source) -> MicroBatchIterator:
    """The same iterations at every evaluation, so that the losses of two are of the same documents: --eval-iters,
    or all that the set holds."""
    coming, evaluation = plan_iterations(source.planner, shard_settings(source)), source.job.evaluation
    # Kept for the whole run: one rank's share.
    shares, once = itertools.tee(replace(iteration, state=dict, plan=None) for iteration in coming)
    sampler = MicroBatchSampler(over_and_over(shares, None if evaluation.full else evaluation.iterations))
    loader = make_loader(source.corpus, sampler, rank_layout(source), source.job, source.read_ahead)
    return WholeSetIterator(loader, once) if evaluation.full else MicroBatchIterator(loader)


PLANS_AHEAD = 4
"""Iterations planned before they are asked for."""


def training_iterator(source: Source, agreement: PlanAgreement) -> MicroBatchIterator:
    """Called on every rank at once. agreement: begun."""
    job = source.job
    spans = stores.common_store("trace")
    remember(source, source.planner.snapshot())
    registered = getattr(get_args(), "nccl_ub", False)
    if line := recomputation.begin(recompute_memory(job), job, registered=registered):
        print_rank_0(f"> wlb_megatron: {line}")
    settings, layout = reporting(shard_settings(source), source), rank_layout(source)
    stores.share_failures()
    plan_ahead = _plan_ahead(source, settings)
    sampler = MicroBatchSampler(plan_ahead, partial(agreement.see, dp_rank=settings.dp_rank))
    latest: int | None = None

    def trained(batches: list[LoadedMicroBatch], skipped: bool) -> None:
        nonlocal latest
        iteration = batches[0].planned.iteration
        if iteration == latest or iteration not in sampler.passed:
            return  # run again by Megatron, to tell a wrong result from a wrong GPU; or out of a checkpoint for that
        # The step must have trained what was planned.
        latest, planned_iteration = iteration, sampler.passed[iteration]
        places_drawn = [(batch.planned.iteration, batch.planned.index) for batch in batches]
        if places_drawn != [(iteration, index) for index in range(len(planned_iteration.micro_batches))]:
            raise RuntimeError(
                f"wlb_megatron: Megatron drew {len(batches)} micro-batches, iteration {iteration} was planned with "
                f"{len(planned_iteration.micro_batches)}: the batch size was changed behind the plan"
            )
        agreement.check()
        checked(partial(_check_count, planned_iteration, job.batches.micro_batch_size))
        # The next checkpoint is this iteration's; plans before it are not needed any more.
        for passed in [number for number in sampler.passed if number < iteration]:
            del sampler.passed[passed]
        remember(source, planned_iteration.state, applied=skipped)
        waited = plan_ahead.take_waited()
        if skipped:
            _print_skipped(planned_iteration)
            return
        # Figures for the log.
        count_segments([batch.document_lengths() for batch in batches])
        timers.add("wlb-plan-wait", waited)
        timers.add("wlb-planning", planned_iteration.micro_batches[0].plan_seconds)
        timers.add("wlb-predicted", (planned_iteration.predicted_ms or 0.0) / 1e3)
        number = get_args().curr_iteration + 1
        metrics.stepped(
            *(number, batches, planned_iteration, source.config),
            step_start=iterator.began,
            waited=waited,
            corpora=source.names,
        )
        pieces = [micro_batch.pieces for micro_batch in planned_iteration.micro_batches]
        trace.after_iteration(number, job, spans, pieces)

    # What runs before step 1: the longest micro-batches that the job can meet.
    rehearses = {"auto": job.device.on_gpu, "always": True, "never": False}[source.config.rehearsal]
    max_tokens = source.planner.packer.max_tokens
    max_tokens += padding(max_tokens, settings.alignment)
    documents = min(source.config.max_documents, 1 + int(1.5 * max_tokens / source.mean_length))
    rehearsal = None
    if rehearses:
        held_micro_batches = -(-source.planner.packer.held_tokens // max_tokens)
        rehearsal = longest_micro_batches(
            *(max_tokens, job.batches.window, settings, layout, source.corpus, documents),
            chunked=(held_micro_batches, max(job.batches.window, source.longest)),
            count=job.sizes.micro_step_multiple,
        )
    # What a step's gradients are divided by.
    equal_tokens = 0
    if weighs_equally(source.config, source.planner.packer):
        equal_tokens = max(1, round(job.batches.joined_window * job.sizes.data * source.trained_share))
    iterator = MicroBatchIterator(
        make_loader(source.corpus, sampler, layout, job, source.read_ahead),
        trained,
        rehearsal,
        equal_tokens,
        defers_losses=not job.trainer.shards_weights,
    )
    return iterator


def _plan_ahead(source: Source, settings: ShardSettings) -> PlanAhead:
    """What makes iterations early: a thread that plans, or that takes the plans of a process or of dynamic groups."""
    planner, config = source.planner, source.config
    make: Callable[[], Iterator[PlannedIteration]] = partial(plan_iterations, planner, settings)
    if in_a_process(planner, config, source.mean_length):
        documents_each = planner.global_tokens / source.mean_length
        print_rank_0(
            f"> wlb_megatron: a process on each rank plans iterations, of about {documents_each:,.0f} documents"
        )
        logs = config.log_plans and is_last_rank()
        make = partial(plan_in_a_process, planner, settings, keeps_plans=logs)
    if config.cp_mode == "dynamic":
        make = training_plans(source, settings, lambda: plan_ahead)
    plan_ahead = PlanAhead(make, PLANS_AHEAD)
    if config.cp_mode == "dynamic":
        atexit.register(plan_ahead.close)
    return plan_ahead


def _check_count(planned_iteration: PlannedIteration, micro_batch_size: int) -> None:
    """Refused if Megatron's count of windows is not the plan's: its checkpoint would then be of another number of
    samples than the packing state in it. micro_batch_size: windows."""
    before, size = get_args().consumed_train_samples, get_current_running_global_batch_size()
    if (before + size) // micro_batch_size != planned_iteration.samples:
        raise Refused(
            f"the plan has trained {planned_iteration.samples * micro_batch_size:,} samples with this iteration, "
            f"Megatron counts {before:,} and a global batch of {size:,}: something has changed its count, or the batch "
            "size, behind the plan; resume from the last checkpoint without it"
        )


def _print_skipped(planned_iteration: PlannedIteration) -> None:
    summary = planned_iteration.micro_batches[0].summary
    print_rank_0(
        f"> wlb_megatron: an iteration of --iterations-to-skip: its {summary.documents} documents, {summary.tokens} "
        "tokens, are used up and not trained"
    )


def reporting(settings: ShardSettings, source: Source) -> ShardSettings:
    """On the rank that logs: with the prediction of each iteration's time, as planned and in arrival order."""
    job = source.job
    if not is_last_rank():
        return settings
    if job.profile is None and not job.device.on_gpu:
        return settings  # the built-in figures are a GPU's
    predict = predictor(job, settings.dp_rank, memory=recompute_memory(job), table=settings.table)
    if predict is None:
        return settings
    settings = replace(settings, predict=predict)
    arrival_order = partial(in_arrival_order, settings, cost_model(job), job.sizes.data)
    return replace(settings, arrival_order=arrival_order)


def shard_settings(source: Source) -> ShardSettings:
    job, model, tp = source.job, source.job.model, source.job.sizes.tensor
    kernels = job.kernels()
    if job.costs is not None:
        table = job.costs.table
    elif job.device.on_gpu:
        table = of_gpu(shared_gpu(torch.cuda.get_device_name(job.device.index)), kernels)
    else:
        table = h100()
    if kernels == "cudnn":
        table = replace(table, backend=kernels)  # whoever's times: its graphs bound what one call may hold
    # An iteration's predictions by depth, where losses are scaled by them: multi-token prediction, fp16. Or where the
    # log counts them: with masks.
    counts = model.depths or model.dtype == "float16" or source.corpus.masked
    heads = {"heads": model.shape.heads // tp, "kv_heads": max(1, model.shape.kv_heads // tp)}
    return ShardSettings(
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_size=job.sizes.context,
        alignment=job.alignment,
        sharding=source.config.sharding,
        in_step=job.trainer.in_step,
        keeps_layers=recompute_memory(job) is not None,
        table=table.scaled(**heads, head_dim=model.shape.head_dim),
        predictions=partial(predictions_in, source.corpus, model.depths) if counts else nothing_counted,
    )


def rank_layout(source: Source) -> Layout:
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
