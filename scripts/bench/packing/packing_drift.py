"""Do thresholds learnt once serve a corpus whose lengths drift? Against ones learnt anew from what arrived lately."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from scripts.bench.packing.packing_rows import COST, Seen
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.lengths import sample_lengths
from wlb_megatron.documents.synthetic import code_like, cut_overlong, lognormal
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.delay_bound import Limits
from wlb_megatron.packing.varlen.thresholds import Repeated, find_thresholds

BINS, ITERATIONS = 4, 240
"""Micro-batches, and iterations of each half."""

EVERY, RECENT = 80, 8192
"""Learnt anew each so many iterations, on the last so many documents."""

Kinds = dict[str, np.ndarray]


def drift_rows(paper_like: np.ndarray, wikipedia_like: np.ndarray) -> Iterator[dict[str, Any]]:
    """Second halves of corpora whose lengths change in the middle, over three shuffles."""
    kinds = {
        "wikipedia": wikipedia_like,
        "paper": paper_like,
        "code": code_like(100_000),
        "lognormal": lognormal(400_000),
    }
    for window in (32768, 131072):
        for before, after in (("wikipedia", "paper"), ("lognormal", "paper"), ("code", "wikipedia")):
            for learnt in ("first half", "second half", "anew"):
                seen = [_second_half(kinds[before], kinds[after], window, learnt, seed) for seed in (1, 2, 3)]
                rows = [interval.row([0.0, 0.0]) for interval in seen]
                yield {
                    "section": "drift",
                    "lengths": f"{before}, then {after}",
                    "window": window,
                    "thresholds learnt on": learnt,
                    **{
                        key: f"{np.mean([float(r[key]) for r in rows]):.4f}"
                        for key in ("imbalance", "p95", "slowdown", "delay")
                    },
                }


def _second_half(first: np.ndarray, second: np.ndarray, window: int, learnt: str, seed: int) -> Seen:
    halves = [_half(lengths, window, seed) for lengths in (first, second)]
    sample = sample_lengths(halves[1 if learnt == "second half" else 0], window, "split", 8192)
    packer = make_packer(WlbConfig(), COST, window=window, micro_batches=BINS, sample=sample)
    planner = Planner(Repeated(np.concatenate(halves)), packer, global_tokens=BINS * window)
    limits = Limits(BINS, window, packer.max_tokens, 4096, 16)
    recent: list[int] = []
    seen = Seen()
    for at in range(2 * ITERATIONS):
        plan = planner.next_iteration()
        assert plan is not None
        recent = (recent + [piece.tokens for piece in plan.arrived])[-RECENT:]
        if learnt == "anew" and at % EVERY == EVERY - 1:
            state = packer.state()
            state["settings"]["thresholds"] = list(find_thresholds(recent, COST, limits).thresholds)
            packer.load_state(state)  # what waits moves to its new level
        (seen.add if at >= ITERATIONS else seen.arrive)(plan)
    return seen


def _half(lengths: np.ndarray, window: int, seed: int) -> np.ndarray:
    """As many of the lengths, shuffled and repeated where needed, as half the iterations take."""
    shuffled = np.random.default_rng(seed).permutation(cut_overlong(lengths[lengths > 0], window))
    goal = ITERATIONS * BINS * window
    repeated = np.tile(shuffled, -(-goal // int(shuffled.sum())))
    return repeated[: int(np.searchsorted(np.cumsum(repeated), goal)) + 1]
