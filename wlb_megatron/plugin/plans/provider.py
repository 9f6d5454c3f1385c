"""The dataset provider that Megatron calls on every rank."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from wlb_megatron.errors import WlbError
from wlb_megatron.packing.choices import began_otherwise, saved_choices
from wlb_megatron.plugin.micro_batches.iterators import EvaluationIterator
from wlb_megatron.plugin.micro_batches.planning import PlannedIteration, plan_iterations
from wlb_megatron.plugin.model.kernels import kernels_of
from wlb_megatron.plugin.plans import checkpoint
from wlb_megatron.plugin.plans.agreement import PlanAgreement
from wlb_megatron.plugin.plans.data import MicroBatchSampler
from wlb_megatron.plugin.plans.first_lines import first_lines
from wlb_megatron.plugin.plans.rank_settings import rank_layout, rank_loader, shard_settings
from wlb_megatron.plugin.plans.resume import LoadedAt, restore
from wlb_megatron.plugin.plans.source import Source, open_part
from wlb_megatron.plugin.plans.training import training_iterator
from wlb_megatron.plugin.trials.megatron_trial import try_megatron


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
        for part, source in sources.items():
            sources[part] = replace(source, job=source.job.with_vocabulary(args.padded_vocab_size))
        try_megatron()
        lines: list[str] = []
        if "train" in sources:  # else --skip-train
            at = LoadedAt(args.iteration, args.consumed_train_samples)
            if at.begun:
                sources["train"] = _as_it_began(sources["train"])
            sources["train"], lines = restore(sources["train"], at)
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
        made[:] = [(train, valid, test)]
        return made[0]

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


def _as_it_began(source: Source) -> Source:
    """The same documents, in chunks or whole and by the law with which the checkpoint's run packs them."""
    saved = saved_choices(checkpoint.loaded_state())
    config = began_otherwise(source.config, source.planner.packer, saved)
    if config is None:
        return source
    try:
        job = source.job.with_config(config)
        began = open_part(job, "train", job.batches.schedule, keeps_layers=saved["keeps_layers"])
    except WlbError as error:  # a flag or the layout forbids it now
        said = f"documents do not train in chunks or whole as the run began: {error}"
        return replace(source, messages=(*source.messages, said))
    assert began is not None  # it has been opened before
    now, stays = (
        ("no", "documents train in chunks, as the run began; --wlb-chunks off keeps them whole")
        if saved["chunks"]
        else ("yes", "documents stay whole, as the run began; --wlb-chunks on takes chunks")
    )
    messages = tuple(line.replace(f"documents in chunks: {now}", stays) for line in source.messages)
    return replace(began, job=source.job, messages=messages)


def _agree(sources: dict[str, Source]) -> PlanAgreement:
    """Compare what decides all plans to come, of every part."""
    agreement, first = PlanAgreement(), next(iter(sources.values()))
    settings = shard_settings(first)
    states = [json.dumps(source.planner.state(), sort_keys=True) for source in sources.values()]
    decisive = settings.table.to_json(), settings.sharding, first.config.cp_mode, kernels_of(first.job)[0]
    agreement.begin(*decisive, *states)
    return agreement


def _evaluation(source: Source) -> EvaluationIterator:
    """The same iterations at every evaluation, so that the losses of two are of the same documents: --eval-iters,
    or all that the set holds."""
    planned, evaluation = plan_iterations(source.planner, shard_settings(source)), source.job.evaluation
    # Kept for the whole run: one rank's share.
    shares = (replace(iteration, state=dict, plan=None) for iteration in planned)
    again = Again(shares, None if evaluation.full else evaluation.iterations)
    loader = rank_loader(source, MicroBatchSampler(again), rank_layout(source))
    return EvaluationIterator(loader, again, full=evaluation.full)


class Again(Iterable[PlannedIteration]):
    """An evaluation's iterations over and over, each time from the first one. Of a set of three iterations an
    evaluation of four takes 0 1 2 0, and so does the next one.

    An iteration is planned when the first evaluation comes to it. Planned at the start of a job of thousands of ranks,
    100 of them would take a minute in which all GPUs wait, for a test set that few jobs come to, too.

    wanted: an evaluation has come; before that, none are given out.
    """

    def __init__(self, coming: Iterator[PlannedIteration], iterations: int | None) -> None:
        """iterations: of an evaluation; None: all that come."""
        self._coming, self._iterations = coming, iterations
        self.wanted = False
        self._planned: list[PlannedIteration] = []

    def __len__(self) -> int:
        """How many come; plans them all."""
        self._planned.extend(self._coming)
        return len(self._planned)

    def __iter__(self) -> Iterator[PlannedIteration]:
        while self.wanted:
            for at in itertools.count() if self._iterations is None else range(self._iterations):
                if at >= len(self._planned):
                    self._planned.extend(itertools.islice(self._coming, 1))
                if at >= len(self._planned) and self._iterations is None:
                    break
                yield self._planned[at % len(self._planned)]
