"""What the packing tests share: a plain stream, a run that checks every promise of a plan, and what it returns."""

import json
from collections import Counter
from dataclasses import fields
from typing import Any

import numpy as np

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.lengths import long_tailed
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.items import Item
from wlb_megatron.plan import IterationPlan, Piece
from wlb_megatron.registry import PACKERS
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN, CostModel

COST = CostModel(quadratic_at=8.0, per_document=0.5)

QUICK_PACKINGS = tuple(name for name, entry in PACKERS.items() if not entry.instead)
"""Every packer's name but the exact solver's, which takes too long for many plans. test_packing_resume.py has all."""


class ListStream:
    """Documents of these lengths, ids counted up; over and over by epochs if endless."""

    def __init__(self, lengths: list[int], endless: bool = False) -> None:
        self.lengths = lengths
        self.endless = endless
        self.given = 0

    def next(self) -> Piece | None:
        epoch, document = divmod(self.given, len(self.lengths)) if self.lengths else (1, 0)
        if epoch and not self.endless:
            return None
        self.given += 1
        return Piece(epoch, document, 0, self.lengths[document])

    def state(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def make_job(*, cost: CostModel = COST, **settings: Any) -> PackingJob:
    """A packer's job; settings: of the job or of the plugin. One micro-batch a window unless told otherwise."""
    job = {field.name: settings.pop(field.name) for field in fields(PackingJob) if field.name in settings}
    return PackingJob(WlbConfig(**{"micro_batches_per_window": "1"} | settings), cost, **job)


def make_planner(lengths: Any, *, endless: bool = False, **settings: Any) -> Planner:
    """Of documents with these lengths, or of a stream; settings: as make_job()."""
    job = make_job(**settings)
    stream = ListStream(lengths, endless) if isinstance(lengths, list) else lengths
    return Planner(stream, make_packer(job), global_tokens=job.bins * job.window)


def resumed(first: Planner, second: Planner) -> Planner:
    """The second one, which goes on where the first stands."""
    second.load_state(json.loads(json.dumps(first.state())))
    return second


def long_run(iterations: int, **settings: Any) -> list[IterationPlan]:
    """Plans of a long-tailed corpus in windows of 128K on four stages."""
    lengths = np.random.default_rng(0).permutation(long_tailed(131072))[:30_000].tolist()
    job = {"window": 131072, "micro_batches": 4, "pp": 4, "endless": True} | settings
    return run(make_planner(lengths, cost=CostModel(24576.0, 0.0, 1000.0), **job), most=iterations)


def run(planner: Planner, most: int = 10_000) -> list[IterationPlan]:
    """Plans until a finite stream is drained, at most so many."""
    plans = []
    for _ in range(most):
        plan = planner.next_iteration()
        if plan is None:
            break
        plans.append(plan)
    return plans


def micro_batches(plan: IterationPlan) -> list[Any]:
    return [micro_batch for row in plan.micro_batches for micro_batch in row]


def items_of(lengths: list[int], cost: CostModel) -> list[Item]:
    """A packer's items, one of each document."""
    work = cost.work(lengths).tolist()
    return [Item(w, n, i, 0, Piece(0, i, 0, n)) for i, (w, n) in enumerate(zip(work, lengths, strict=True))]


def trained(plan: IterationPlan) -> list[Piece]:
    return sorted(piece for micro_batch in micro_batches(plan) for piece in micro_batch.pieces)


def token_counts(pieces: list[Piece]) -> Counter[tuple[int, int, int]]:
    """How often each token (epoch, document, position) occurs."""
    return Counter((p.epoch, p.document, at) for p in pieces for at in range(p.start, p.end))


def imbalance(plan: IterationPlan) -> float:
    work = [micro_batch.work for micro_batch in micro_batches(plan)]
    return max(work) * len(work) / sum(work)


def check_promises(
    plans: list[IterationPlan],
    capacity: int,
    *,
    bins: int | None = None,
    most_documents: int = 4096,
    finite: bool = True,
) -> None:
    """Each token that arrived trains once or still waits; no micro-batch is empty, but in the last iteration of a
    finite stream; none is above the capacity or the cap on documents; works are the cost model's."""
    arrived: list[Piece] = []
    done: list[Piece] = []
    for number, plan in enumerate(plans):
        assert plan.iteration == number
        assert bins is None or len(micro_batches(plan)) == bins
        arrived += plan.arrived
        for micro_batch in micro_batches(plan):
            assert micro_batch.pieces or (finite and plan is plans[-1]), f"an empty one in iteration {number}"
            assert micro_batch.tokens <= capacity
            assert len(micro_batch.pieces) <= most_documents
            assert all(piece.end > piece.start for piece in micro_batch.pieces)
            assert micro_batch.work == int(COST.work([p.tokens for p in micro_batch.pieces]).sum())
        done += trained(plan)
    waiting = list(plans[-1].waiting) if plans else []
    assert token_counts(arrived) == token_counts(done + waiting)
    if finite:
        assert not waiting


def delays(plans: list[IterationPlan]) -> dict[Piece, int]:
    """Iterations from arrival to training of pieces that were not cut."""
    entry = {piece: plan.iteration for plan in plans for piece in plan.arrived}
    return {
        piece: plan.iteration - entry[piece] for plan in plans for piece in trained(plan) if piece in entry
    }


def time_per_token(plans: list[IterationPlan], stages: int, own: int) -> float:
    """By brute-force 1F1B events; own: what a micro-batch costs by itself (tokens)."""
    works = [[batch.work / UNITS_PER_TOKEN + own for batch in micro_batches(plan)] for plan in plans]
    time = sum(one_f_one_b_time(each, stages) / 3 for each in works)
    return time / sum(micro_batch.tokens for plan in plans for micro_batch in micro_batches(plan))


def one_f_one_b_time(works: list[float], stages: int) -> float:
    """When the last stage-task of a 1F1B schedule ends; forward takes a micro-batch's work, backward twice that."""
    count = len(works)
    queues = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, count)
        tasks = [(False, at) for at in range(warm)]
        for at in range(count - warm):
            tasks += [(False, warm + at), (True, at)]
        queues.append(tasks + [(True, at) for at in range(count - warm, count)])
    done: dict[tuple[bool, int, int], float] = {}
    clock = [0.0] * stages
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                backward, at = queue[0]
                if not backward:
                    before = (False, at, stage - 1) if stage else None
                else:
                    before = (True, at, stage + 1) if stage < stages - 1 else (False, at, stage)
                if before is not None and before not in done:
                    break
                start = max(clock[stage], done[before] if before is not None else 0.0)
                clock[stage] = done[backward, at, stage] = start + works[at] * (2 if backward else 1)
                queue.pop(0)
    return max(clock)
