"""The dataset provider that Megatron calls on every rank."""

from __future__ import annotations

import atexit
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.predictions import predictions_in
from wlb_megatron.plan import Piece
from wlb_megatron.plugin.flags.rank_counts import RankCounts
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.logs import metrics, timers, trace
from wlb_megatron.plugin.logs.flops import count_segments
from wlb_megatron.plugin.logs.prediction import predictor
from wlb_megatron.plugin.model.kernels import kernels_of
from wlb_megatron.plugin.plans.agreement import PlanAgreement, shared_gpu
from wlb_megatron.plugin.plans.data import MicroBatchSampler, make_loader, read_ahead
from wlb_megatron.plugin.plans.first_lines import first_lines
from wlb_megatron.plugin.plans.iterators import EvaluationIterator, MicroBatchIterator
from wlb_megatron.plugin.plans.loaded import Layout, LoadedMicroBatch
from wlb_megatron.plugin.plans.planning import (
    PlanAhead,
    PlannedIteration,
    ShardSettings,
    nothing_counted,
    plan_iterations,
)
from wlb_megatron.plugin.plans.planning_process import in_a_process, plan_in_a_process
from wlb_megatron.plugin.plans.resume import LoadedAt, remember, restore
from wlb_megatron.plugin.plans.source import Source
from wlb_megatron.plugin.ranks.board import common_store
from wlb_megatron.plugin.ranks.dynamic import training_plans
from wlb_megatron.plugin.step.rehearsal import longest_micro_batches
from wlb_megatron.plugin.trials.megatron_trial import try_megatron
from wlb_megatron.sharding.alignment import padding
from wlb_megatron.workload.kernel_table import h100, of_gpu

PLANS_AHEAD = 4
"""Iterations planned before they are asked for."""


def make_provider(job: TrainingJob, sources: dict[str, Source]) -> Callable[..., tuple[Any, Any, Any]]:
    """train_valid_test_datasets_provider over the sources' plans.

    Asked for each model chunk of a virtual pipeline, it gives the same iterators: micro-batches are drawn once a step.
    """
    made: list[tuple[Any, Any, Any]] = []

    def provider(train_valid_test_num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        from megatron.training import get_args, print_rank_0

        if vp_stage:
            return made[0]
        args = get_args()
        known = job.with_vocabulary(args.padded_vocab_size)
        try_megatron()
        said: list[str] = []
        if "train" in sources:  # else --skip-train
            at = LoadedAt(args.iteration, args.consumed_train_samples)
            said = restore(sources["train"], at, known.sizes, known.batches.each)
        first = next(iter(sources.values()))
        said += first_lines(known, first, _settings(first, known).table.backend)
        for line in said:
            print_rank_0(f"> wlb_megatron: {line}")
        agreement = _agree(sources, known)
        # Training last: its planning thread must not hold a lock while evaluation's workers are forked.
        valid: Any = [_evaluation(sources[part], known) for part in sources if part.startswith("valid")]
        if not known.evaluation.each_set:
            valid = valid[0] if valid else None
        test = _evaluation(sources["test"], known) if "test" in sources else None
        train = _training(sources["train"], known, agreement) if "train" in sources else None
        made[:] = [(train, valid, test)]
        return made[0]

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


def _agree(sources: dict[str, Source], job: TrainingJob) -> PlanAgreement:
    """Compare what decides all plans to come, of every part."""
    agreement, first = PlanAgreement(), next(iter(sources.values()))
    settings = _settings(first, job)
    states = [json.dumps(each.planner.state(), sort_keys=True) for each in sources.values()]
    decisive = settings.table.to_json(), settings.sharding, first.config.cp_mode, kernels_of(job)[0]
    agreement.begin(*decisive, *states)
    return agreement


def _training(source: Source, job: TrainingJob, agreement: PlanAgreement) -> MicroBatchIterator:
    from megatron.training import get_args, print_rank_0
    from megatron.training.utils import is_last_rank

    spans, traced = common_store("trace"), _traced(source.config, job.sizes)
    remember(source, source.planner.snapshot())
    settings, layout = _reporting(_settings(source, job), job), _layout(job)
    make: Callable[[], Iterator[PlannedIteration]] = partial(plan_iterations, source.planner, settings)
    if in_a_process(source.planner, source.config, source.mean_length):
        each = source.planner.global_tokens / source.mean_length
        print_rank_0(
            f"> wlb_megatron: a process on each rank plans iterations, of about {each:,.0f} documents"
        )
        logs = source.config.log_plans and is_last_rank()
        make = partial(plan_in_a_process, source.planner, settings, keeps_plans=logs)
    if source.config.cp_mode == "dynamic":
        make = training_plans(source.planner, source.config, job, settings, lambda: ahead)
    ahead = PlanAhead(make, PLANS_AHEAD)
    if source.config.cp_mode == "dynamic":
        atexit.register(ahead.close)
    sampler = MicroBatchSampler(ahead, partial(agreement.see, dp_rank=settings.dp_rank))
    latest: int | None = None

    def trained(batches: list[LoadedMicroBatch], skipped: bool) -> None:
        nonlocal latest
        iteration = batches[0].planned.iteration
        if iteration == latest or iteration not in sampler.passed:
            return  # run again by Megatron, to tell a wrong result from a wrong GPU; or out of a checkpoint for that
        latest, planned = iteration, sampler.passed[iteration]
        drawn = [(batch.planned.iteration, batch.planned.index) for batch in batches]
        if drawn != [(iteration, index) for index in range(len(planned.micro_batches))]:
            raise RuntimeError(
                f"wlb_megatron: Megatron drew {len(batches)} micro-batches, iteration {iteration} was planned with "
                f"{len(planned.micro_batches)}: the batch size was changed behind the plan"
            )
        agreement.check()
        for passed in [number for number in sampler.passed if number < iteration]:
            del sampler.passed[passed]
        remember(source, planned.state, applied=skipped)
        waited, began = ahead.take_waited(), iterator.take_began()
        if skipped:
            _tell_skipped(planned)
            return
        count_segments([batch.bounds for batch in batches])
        timers.add("wlb-plan-wait", waited)
        timers.add("wlb-planning", planned.micro_batches[0].plan_seconds)
        timers.add("wlb-predicted", (planned.predicted_ms or 0.0) / 1e3)
        number = get_args().curr_iteration + 1
        metrics.stepped(
            *(number, batches, planned, source.config), began=began, waited=waited, corpora=source.names
        )
        pieces = [one.pieces for one in planned.micro_batches]
        trace.after_iteration(number, traced, spans, pieces)

    wanted = {"auto": job.device.on_gpu, "always": True, "never": False}[source.config.rehearsal]
    most = source.planner.packer.max_tokens
    most += padding(most, settings.alignment)
    documents = min(source.config.max_documents, 1 + int(1.5 * most / source.mean_length))
    longest = None
    if wanted:
        seconds = source.config.graph_seconds
        held = -(-source.planner.packer.held_tokens // most)
        longest = longest_micro_batches(
            *(most, job.batches.window, settings, layout, source.corpus, documents, seconds, held),
            longest=max(job.batches.window, source.longest),
        )
    iterator = MicroBatchIterator(_loader(source, sampler, layout, job), trained, longest)
    return iterator


def _traced(config: WlbConfig, sizes: RankCounts) -> trace.Traced | None:
    if config.trace is None:
        return None
    return trace.Traced(Path(config.trace), config.trace_iteration, sizes.context, sizes.tensor)


def _tell_skipped(planned: PlannedIteration) -> None:
    from megatron.training import print_rank_0

    summary = planned.micro_batches[0].summary
    print_rank_0(
        f"> wlb_megatron: an iteration of --iterations-to-skip: its {summary.documents} documents, {summary.tokens} "
        "tokens, are used up and not trained"
    )


def _evaluation(source: Source, job: TrainingJob) -> MicroBatchIterator:
    """The same iterations at every evaluation, so that the losses of two are of the same documents: --eval-iters,
    or all that the set holds."""
    planned, evaluation = plan_iterations(source.planner, _settings(source, job)), job.evaluation
    chosen = planned if evaluation.full else itertools.islice(planned, evaluation.iterations)
    plans = [
        replace(each, state=dict, plan=None) for each in chosen
    ]  # kept for the whole run, one rank's share
    each = len(plans) if evaluation.full else evaluation.iterations
    loader = _loader(source, MicroBatchSampler(Again(plans, each)), _layout(job), job)
    return EvaluationIterator(loader, len(plans)) if evaluation.full else MicroBatchIterator(loader)


class Again(Iterable[PlannedIteration]):
    """An evaluation's iterations over and over, each time from the list's beginning. Of a set of three iterations an
    evaluation of four takes 0 1 2 0, and so does the next one."""

    def __init__(self, planned: list[PlannedIteration], iterations: int) -> None:
        self._planned = list(itertools.islice(itertools.cycle(planned), iterations))

    def __iter__(self) -> Iterator[PlannedIteration]:
        return itertools.cycle(self._planned)


def _reporting(settings: ShardSettings, job: TrainingJob) -> ShardSettings:
    """On the rank that logs: with the prediction of each iteration's time."""
    from megatron.training.utils import is_last_rank

    if not is_last_rank():
        return settings
    if job.profile is None and not job.device.on_gpu:
        return settings  # the built-in figures are a GPU's
    costs = None if job.profile is None else job.profile.costs
    predict = predictor(job, costs, settings.dp_rank, settings.alignment, in_step=settings.in_step)
    return replace(settings, predict=predict)


def _predictions(source: Source, job: TrainingJob) -> Callable[[Sequence[Piece]], tuple[int, ...]]:
    """Counts an iteration's predictions by depth, where losses are scaled by them: multi-token prediction, fp16."""
    further, scaled = job.model.depths, job.model.dtype == "float16"
    return partial(predictions_in, source.corpus, further) if further or scaled else nothing_counted


def _settings(source: Source, job: TrainingJob) -> ShardSettings:
    from megatron.core import parallel_state

    model, tp = job.model, job.sizes.tensor
    kernels, _ = kernels_of(job)
    if job.profile is not None:
        table = job.profile.costs.table
    elif job.device.on_gpu:
        table = of_gpu(shared_gpu(torch.cuda.get_device_name(job.device.index)), kernels)
    else:
        table = h100()
    if kernels == "cudnn":
        table = replace(table, backend=kernels)  # whoever's times: its graphs bound what one call may hold
    heads = {"heads": model.heads // tp, "kv_heads": max(1, model.kv_heads // tp)}
    return ShardSettings(
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_size=job.sizes.context,
        alignment=job.alignment,
        sharding=source.config.sharding,
        in_step=job.trainer.in_step,
        table=table.scaled(**heads, head_dim=model.head_dim),
        predictions=_predictions(source, job),
    )


def _layout(job: TrainingJob) -> Layout:
    from megatron.core import parallel_state

    model, sizes = job.model, job.sizes
    return Layout(
        cp_rank=parallel_state.get_context_parallel_rank(),
        activation_divisor=sizes.tensor if sizes.sequence else 1,
        hidden_size=model.hidden,
        reads_tokens=parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        window=model.window,
        stage_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        cp_size=sizes.context,
        routes=model.experts is not None,
        follows=model.depths,
        vocabulary=model.vocabulary,
        by_document=model.experts is not None and "seq_aux_loss" in model.experts.balancing,
    )


def _loader(source: Source, sampler: MicroBatchSampler, layout: Layout, job: TrainingJob) -> Any:
    return make_loader(
        source.corpus,
        sampler,
        layout,
        workers=job.workers,
        ahead=read_ahead(source.micro_batches, source.most_micro_batches),
        pin_memory=job.device.on_gpu,
        ignored_signal=job.ignored_signal,
    )
