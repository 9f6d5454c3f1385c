"""Packing states as an earlier commit wrote them, and what its planner did next: tests resume them.

cd CHECKOUT_OF_THAT_COMMIT && PYTHONPATH=.:tests python PATH_OF_THIS_FILE > tests/states/COMMIT.json
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from packing_oracle import COST, make_planner
from training_jobs import training_job

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blend import Blend
from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plan import IterationPlan, PlanSummary, Summariser
from wlb_megatron.plugin.plans import resume
from wlb_megatron.plugin.plans.source import Source

TRAINED, NEXT = 4, 6
"""Iterations before the state was saved, and those noted after it."""


def _varlen(**settings: Any) -> Source:
    planner = make_planner([5, 9, 3, 16, 7, 12] * 9, window=16, micro_batches=4, endless=True, **settings)
    job = training_job(wlb_quadratic_at=99.0, wlb_document_cost=0.0)
    return Source(Blend([]), planner, job, 4, 8.0, (), 0)


def _fixed_windows() -> Source:
    windows = {"packing": "original", "chunks": "off"}
    config = WlbConfig(quadratic_at=99.0, document_cost=0.0, **windows)
    corpus = Corpus("one", np.array([5, 9, 3, 16, 7, 12] * 4))
    stream = DocumentStream([corpus], Rules(16, seed=3, endless=True))
    packer = make_packer(PackingJob(config, COST, window=16, micro_batches=4))
    planner = Planner(stream, packer, global_tokens=64)
    return Source(Blend([]), planner, training_job().with_config(config), 4, 8.0, (), 0)


MAKERS: dict[str, Callable[[], Source]] = {
    "documents wait": _varlen,
    "documents in chunks": lambda: _varlen(chunks="on", pp=2, micro_batches_per_window="auto"),
    "fixed windows": _fixed_windows,
}
"""Each trains 4 windows of 16 tokens an iteration."""


def saved(commit: str) -> dict[str, Any]:
    """By name of MAKERS: `state`, the text in the checkpoint's arguments; `next`, see noted."""
    path = Path(__file__).parent / "states" / f"{commit}.json"
    states: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return states


def noted(plan: IterationPlan, summary: PlanSummary) -> dict[str, Any]:
    """An iteration: its figures of delay, and pieces by [micro-batch][data-parallel rank]."""
    pieces = [[[list(piece) for piece in batch.pieces] for batch in row] for row in plan.micro_batches]
    return {"delayed": summary.delayed, "token_delay": summary.token_delay, "pieces": pieces}


def _write() -> None:
    states = {}
    for name, make in MAKERS.items():
        source, summariser, after = make(), Summariser(), []
        args = argparse.Namespace()
        for iteration in range(TRAINED + NEXT):
            if iteration == TRAINED:
                resume.remember(source, source.planner.snapshot())
                resume.wrap_generate_state_dict(lambda args: args, args)
            plan = source.planner.next_iteration()
            assert plan is not None
            after.append(noted(plan, summariser.summarise(plan)))
        states[name] = {"state": args.wlb_state, "next": after[TRAINED:]}
    json.dump(states, sys.stdout)


if __name__ == "__main__":
    _write()
