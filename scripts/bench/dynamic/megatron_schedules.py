"""Plans by Megatron-LM's own schedulers of packed sequences, whose code runs unchanged from a checkout.

default_dynamic_cp (branch dev) chooses a degree for each document, dp_balanced (dev, and main since pull request 6742)
packs documents in their order at one degree. Both pack several documents into a micro-batch and pad each of them.
BalancedCPScheduler (--hybrid-context-parallel of main and of releases) runs one document a forward.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.plan import Group, StepPlan


class Padded(NamedTuple):
    """A plan, and the tokens of each document as Megatron pads them."""

    plan: StepPlan
    tokens: list[int]


def use_checkout(path: Path | None) -> None:
    """Import `megatron` from this folder from now on; None: the installed one. SystemExit where it has no scheduler
    that packs."""
    if path is not None:
        sys.path.insert(0, str(path.resolve()))
    try:
        from megatron.core.datasets.data_schedule import (  # type: ignore[attr-defined]  # noqa: F401
            DefaultDynamicCPScheduler,
        )
    except ImportError as error:
        raise SystemExit(f"--megatron: a checkout of Megatron-LM's branch dev is needed ({error})") from None


def dynamic_plan(tokens: Sequence[int], stage: Stage, rank_tokens: int) -> Padded:
    """default_dynamic_cp over all ranks. rank_tokens: --max-seqlen-per-dp-cp-rank."""
    from megatron.core.datasets.data_schedule import DefaultDynamicCPScheduler  # type: ignore[attr-defined]

    padded = pad(tokens, 2 * stage.ranks)
    scheduler = DefaultDynamicCPScheduler(rank_tokens, stage.ranks, 1, None, min_cp_size=1)
    return Padded(_plan(scheduler.get_groups_and_subsamples(list(enumerate(padded))), stage), padded)


def balanced_plan(tokens: Sequence[int], stage: Stage, context: int, rank_tokens: int) -> Padded:
    """dp_balanced at this degree of context parallelism, documents in a seeded order, as a dataset shuffles them."""
    from megatron.core.datasets.data_schedule import DpBalancedScheduler  # type: ignore[attr-defined]

    padded = pad(tokens, 2 * context)
    order = random.Random(len(tokens)).sample(range(len(tokens)), len(tokens))
    scheduler = DpBalancedScheduler(rank_tokens, context, stage.ranks // context, None)
    rows = scheduler.get_groups_and_subsamples([(at, padded[document]) for at, document in enumerate(order)])
    return Padded(_plan([[[order[at] for at in held] for held in row] for row in rows], stage), padded)


def rounds_of_one(tokens: Sequence[int], stage: Stage) -> list[list[list[int]]]:
    """BalancedCPScheduler's rounds: of each rank the documents that it runs one after the other."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    group: Any = SimpleNamespace(size=lambda: stage.ranks)
    scheduler = BalancedCPScheduler(stage.tokens[0], group)
    return scheduler.get_groups_and_subsamples(list(enumerate(tokens)), None)[1]


def pad(tokens: Sequence[int], multiple: int) -> list[int]:
    """Lengths rounded up to it (sft_dataset.py, _calculate_padding_divisor)."""
    return [-(-length // multiple) * multiple for length in tokens]


def _plan(rows: Sequence[Sequence[Sequence[int]]], stage: Stage) -> StepPlan:
    """rows[m][r]: documents of rank r in micro-step m. Neighbours with the same ones are a group."""
    steps = []
    for row in rows:
        groups, at = [], 0
        for held, ranks in groupby(map(tuple, row)):
            size = len(list(ranks))
            if size not in stage.sizes or at % size:
                raise ValueError(f"ranks {at} to {at + size - 1} are no group of Megatron's")
            groups.append(Group(at, size, tuple(sorted(held))))
            at += size
        steps.append(tuple(groups))
    return StepPlan(stage.ranks, tuple(steps))
