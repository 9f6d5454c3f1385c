"""The dataset provider that Megatron calls on every rank."""

from __future__ import annotations

import atexit
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from wlb_megatron.documents.predictions import predictions_in
from wlb_megatron.plan import Piece
from wlb_megatron.plugin.flags.batch_sizes import BatchSizes
from wlb_megatron.plugin.flags.chunk_limits import in_step
from wlb_megatron.plugin.flags.job_profile import profile_of, told
from wlb_megatron.plugin.flags.model_shape import attention_shape, token_alignment
from wlb_megatron.plugin.flags.parallel_sizes import ParallelSizes
from wlb_megatron.plugin.logs import metrics, timers, trace
from wlb_megatron.plugin.logs.flops import count_segments
from wlb_megatron.plugin.logs.prediction import predictor
from wlb_megatron.plugin.model.kernels import kernels_of
from wlb_megatron.plugin.plans.agreement import PlanAgreement, shared_gpu
from wlb_megatron.plugin.plans.data import MicroBatchSampler, make_loader, read_ahead
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


def make_provider(sources: dict[str, Source]) -> Callable[..., tuple[Any, Any, Any]]:
    """train_valid_test_datasets_provider over the sources' plans.

    Asked for each model chunk of a virtual pipeline, it gives the same iterators: micro-batches are drawn once a step.
    """
    made: list[tuple[Any, Any, Any]] = []

    def provider(train_valid_test_num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        from megatron.training import get_args, print_rank_0

        if vp_stage:
            return made[0]
        args = get_args()
        try_megatron()
        if "train" in sources:  # else --skip-train
            at = LoadedAt(args.iteration, args.consumed_train_samples)
            for line in restore(sources["train"], at, ParallelSizes.of(args), BatchSizes.of(args).each):
                print_rank_0(f"> wlb_megatron: {line}")
        first = next(iter(sources.values()))
        print_rank_0(
            f"> wlb_megatron: {_documents_of(first)}, packing {first.config.packing}, micro-batches "
            f"of at most {first.planner.packer.max_tokens:,} tokens, sharding {first.config.sharding}, "
            f"attention costs as much as the rest at {first.config.quadratic_at:.0f} tokens"
        )
        for line in first.said:
            print_rank_0(f"> wlb_megatron: {line}")
        profile = profile_of(args)
        if profile is not None:
            print_rank_0(f"> wlb_megatron: {told(profile, args)}")
        elif kernels_of(args)[0] == "fa4" and _settings(first, args).table.backend != "fa4":
            print_rank_0(
                "> wlb_megatron: planning with cuDNN's kernel times: FlashAttention-4's are not built in; "
                "wlb-megatron profile measures them"
            )
        agreement = _agree(sources, args)
        # Training last: its planning thread must not hold a lock while evaluation's workers are forked.
        valid: Any = [_evaluation(sources[part], args) for part in sources if part.startswith("valid")]
        if not args.multiple_validation_sets:
            valid = valid[0] if valid else None
        test = _evaluation(sources["test"], args) if "test" in sources else None
        train = _training(sources["train"], args, agreement) if "train" in sources else None
        made[:] = [(train, valid, test)]
        return made[0]

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


def _documents_of(source: Source) -> str:
    """How many documents train (or are evaluated), and of how many, where others are held out."""
    of = source.corpus.first_ids[-1]
    return f"{source.documents:,} documents" + (f" of {of:,}" if of > source.documents else "")


def _agree(sources: dict[str, Source], args: Any) -> PlanAgreement:
    """Compare what decides all plans to come, of every part."""
    agreement, first = PlanAgreement(), next(iter(sources.values()))
    settings = _settings(first, args)
    states = [json.dumps(each.planner.state(), sort_keys=True) for each in sources.values()]
    decisive = settings.table.to_json(), settings.sharding, first.config.cp_mode, kernels_of(args)[0]
    agreement.begin(*decisive, *states)
    return agreement


def _training(source: Source, args: Any, agreement: PlanAgreement) -> MicroBatchIterator:
    from megatron.training import print_rank_0
    from megatron.training.utils import is_last_rank

    spans = common_store("trace")
    remember(source, source.planner.snapshot())
    settings, layout = _reporting(_settings(source, args), args), _layout(args)
    make: Callable[[], Iterator[PlannedIteration]] = partial(plan_iterations, source.planner, settings)
    if in_a_process(source.planner, source.config, source.mean_length):
        each = source.planner.global_tokens / source.mean_length
        print_rank_0(
            f"> wlb_megatron: a process on each rank plans iterations, of about {each:,.0f} documents"
        )
        logs = source.config.log_plans and is_last_rank()
        make = partial(plan_in_a_process, source.planner, settings, keeps_plans=logs)
    if source.config.cp_mode == "dynamic":
        make = training_plans(source.planner, source.config, args, settings, lambda: ahead)
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
        metrics.stepped(batches, planned, began=began, plan_wait_ms=waited * 1e3, corpora=source.names)
        pieces = [one.pieces for one in planned.micro_batches]
        trace.after_iteration(args.curr_iteration + 1, args, spans, pieces)

    wanted = {"auto": args.distributed_backend == "nccl", "always": True, "never": False}[
        source.config.rehearsal
    ]
    most = source.planner.packer.max_tokens
    most += padding(most, settings.alignment)
    documents = min(source.config.max_documents, 1 + int(1.5 * most / source.mean_length))
    longest = None
    if wanted:
        seconds = source.config.graph_seconds
        held = -(-source.planner.packer.held_tokens // most)
        longest = longest_micro_batches(
            *(most, args.seq_length, settings, layout, source.corpus, documents, seconds, held),
            longest=max(args.seq_length, source.longest),
        )
    iterator = MicroBatchIterator(_loader(source, sampler, layout, args), trained, longest)
    return iterator


def _tell_skipped(planned: PlannedIteration) -> None:
    from megatron.training import print_rank_0

    summary = planned.micro_batches[0].summary
    print_rank_0(
        f"> wlb_megatron: an iteration of --iterations-to-skip: its {summary.documents} documents, {summary.tokens} "
        "tokens, are used up and not trained"
    )


def _evaluation(source: Source, args: Any) -> MicroBatchIterator:
    """The same iterations at every evaluation, so that the losses of two are of the same documents: --eval-iters,
    or all that the set holds."""
    planned = plan_iterations(source.planner, _settings(source, args))
    chosen = planned if args.wlb_full_validation else itertools.islice(planned, args.eval_iters)
    plans = [
        replace(each, state=dict, plan=None) for each in chosen
    ]  # kept for the whole run, one rank's share
    each = len(plans) if args.wlb_full_validation else args.eval_iters
    loader = _loader(source, MicroBatchSampler(Again(plans, each)), _layout(args), args)
    return EvaluationIterator(loader, len(plans)) if args.wlb_full_validation else MicroBatchIterator(loader)


class Again(Iterable[PlannedIteration]):
    """An evaluation's iterations over and over, each time from the list's beginning. Of a set of three iterations an
    evaluation of four takes 0 1 2 0, and so does the next one."""

    def __init__(self, planned: list[PlannedIteration], iterations: int) -> None:
        self._planned = list(itertools.islice(itertools.cycle(planned), iterations))

    def __iter__(self) -> Iterator[PlannedIteration]:
        return itertools.cycle(self._planned)


def _reporting(settings: ShardSettings, args: Any) -> ShardSettings:
    """On the rank that logs: with the prediction of each iteration's time."""
    from megatron.training.utils import is_last_rank

    if not is_last_rank():
        return settings
    profile = profile_of(args)
    if profile is None and args.distributed_backend != "nccl":
        return settings  # the built-in figures are a GPU's
    costs = None if profile is None else profile.costs
    predict = predictor(args, costs, settings.dp_rank, settings.alignment, in_step=settings.in_step)
    return replace(settings, predict=predict)


def _predictions(source: Source, args: Any) -> Callable[[Sequence[Piece]], tuple[int, ...]]:
    """Counts an iteration's predictions by depth, where losses are scaled by them: multi-token prediction, fp16."""
    further = args.mtp_num_layers or 0
    return partial(predictions_in, source.corpus, further) if further or args.fp16 else nothing_counted


def _settings(source: Source, args: Any) -> ShardSettings:
    from megatron.core import parallel_state

    heads, groups, channels = attention_shape(args)
    tp, profile = args.tensor_model_parallel_size, profile_of(args)
    kernels, _ = kernels_of(args)
    if profile is not None:
        table = profile.costs.table
    elif args.distributed_backend == "nccl":
        table = of_gpu(shared_gpu(torch.cuda.get_device_name(args.local_rank)), kernels)
    else:
        table = h100()
    if kernels == "cudnn":
        table = replace(table, backend=kernels)  # whoever's times: its graphs bound what one call may hold
    return ShardSettings(
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_size=args.context_parallel_size,
        alignment=token_alignment(args),
        sharding=source.config.sharding,
        in_step=in_step(args),
        table=table.scaled(heads=heads // tp, kv_heads=max(1, groups // tp), head_dim=channels),
        predictions=_predictions(source, args),
    )


def _layout(args: Any) -> Layout:
    from megatron.core import parallel_state

    from wlb_megatron.attention.core_attention import window_of

    return Layout(
        cp_rank=parallel_state.get_context_parallel_rank(),
        activation_divisor=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        hidden_size=args.hidden_size,
        reads_tokens=parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        window=window_of(args),
        stage_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        cp_size=args.context_parallel_size,
        routes=bool(args.num_experts),
        follows=args.mtp_num_layers or 0,
        vocabulary=args.padded_vocab_size,
        by_document=bool(args.num_experts) and "seq_aux_loss" in str(args.moe_router_load_balancing_type),
    )


def _loader(source: Source, sampler: MicroBatchSampler, layout: Layout, args: Any) -> Any:
    return make_loader(
        source.corpus,
        sampler,
        layout,
        workers=args.num_workers,
        ahead=read_ahead(source.micro_batches, source.most_micro_batches),
        pin_memory=args.distributed_backend == "nccl",
        ignored_signal=int(args.exit_signal) if args.exit_signal_handler else None,
    )
