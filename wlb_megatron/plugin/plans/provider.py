"""The dataset provider that Megatron calls on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wlb_megatron.errors import WlbError
from wlb_megatron.packing.choices import began_otherwise, saved_choices
from wlb_megatron.plugin.micro_batches.iterators import EvaluationIterator, RepeatedIterations
from wlb_megatron.plugin.micro_batches.planning import plan_iterations
from wlb_megatron.plugin.plans.agreement import PlanAgreement
from wlb_megatron.plugin.plans.data import MicroBatchSampler
from wlb_megatron.plugin.plans.first_lines import first_lines
from wlb_megatron.plugin.plans.rank_settings import rank_layout, rank_loader, shard_settings
from wlb_megatron.plugin.plans.resume import LoadedAt, loaded_state, restore
from wlb_megatron.plugin.plans.source import Source, open_part
from wlb_megatron.plugin.plans.training import training_iterator
from wlb_megatron.plugin.trials.megatron_trial import try_megatron


def make_provider(sources: dict[str, Source]) -> Callable[..., tuple[Any, Any, Any]]:
    """train_valid_test_datasets_provider over the sources' plans.

    Asked for each model chunk of a virtual pipeline, it gives the same iterators: micro-batches are drawn once a step.
    """
    iterators: list[tuple[Any, Any, Any]] = []

    def provider(train_valid_test_num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        from megatron.training import get_args, print_rank_0

        if vp_stage:
            return iterators[0]
        args = get_args()
        for part, source in sources.items():
            sources[part] = replace(source, job=source.job.with_vocabulary(args.padded_vocab_size))
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
        valid: Any = [_evaluation(sources[part]) for part in sources if part.startswith("valid")]
        if not first.job.evaluation.each_set:
            valid = valid[0] if valid else None
        test = _evaluation(sources["test"]) if "test" in sources else None
        train = training_iterator(sources["train"], agreement) if "train" in sources else None
        iterators[:] = [(train, valid, test)]
        return iterators[0]

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


def _as_it_began(source: Source) -> Source:
    """The same documents, in chunks or whole and by the law with which the checkpoint's run packs them."""
    saved = saved_choices(loaded_state())
    config = began_otherwise(source.config, source.planner.packer, saved)
    if config is None:
        return source
    try:
        job = source.job.with_config(config)
        reopened = open_part(job, "train", job.batches.schedule, keeps_layers=saved["keeps_layers"])
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
    decisive = settings.table.to_json(), settings.sharding, first.config.cp_mode, first.job.kernels()[0]
    agreement.begin(*decisive, *states)
    return agreement


def _evaluation(source: Source) -> EvaluationIterator:
    """The same iterations at every evaluation, so that the losses of two are of the same documents: --eval-iters,
    or all that the set holds."""
    coming, evaluation = plan_iterations(source.planner, shard_settings(source)), source.job.evaluation
    # Kept for the whole run: one rank's share.
    shares = (replace(iteration, state=dict, plan=None) for iteration in coming)
    repeated = RepeatedIterations(shares, None if evaluation.full else evaluation.iterations)
    loader = rank_loader(source, MicroBatchSampler(repeated), rank_layout(source))
    return EvaluationIterator(loader, repeated, covers_set=evaluation.full)
