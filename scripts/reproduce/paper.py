"""What WLB-LLM (OSDI'25, arXiv 2503.17924) ran and reported."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from wlb_megatron.workload.model import Layout

K = 1024


class Setting(NamedTuple):
    """One training job of the paper. speedup: WLB-LLM over plain 4D, where the paper says it in numbers. windows: their
    number for a data-parallel rank and step; None: one for each pipeline stage, which is the paper's."""

    model: str
    window: int
    layout: Layout
    speedup: float | None = None
    windows: int | None = None

    @property
    def name(self) -> str:
        return f"{self.model}-{self.window // K}K"

    @property
    def micro_batches(self) -> int:
        return self.windows or self.layout.pipeline


def _setting(
    model: str, window: int, tp: int, cp: int, pp: int, dp: int, speedup: float | None = None
) -> Setting:
    return Setting(
        model,
        window * K,
        Layout(tensor=tp, context=cp, pipeline=pp, data=dp, distributed_optimizer=True),
        speedup,
    )


CONFIGURATIONS = (
    _setting("550M", 64, 2, 2, 4, 2),
    _setting("550M", 128, 2, 4, 4, 1),
    _setting("7B", 64, 4, 2, 4, 1),
    _setting("7B", 128, 8, 2, 4, 1, 1.33),
    _setting("30B", 64, 8, 2, 4, 1),
    _setting("30B", 128, 8, 4, 4, 1),
    _setting("70B", 64, 16, 4, 4, 1),
    _setting("70B", 128, 16, 4, 4, 1),
)
INTERLEAVED = tuple(s._replace(layout=replace(s.layout, virtual=2), speedup=None) for s in CONFIGURATIONS)
MANY = tuple(s._replace(windows=16, speedup=None) for s in CONFIGURATIONS)
"""The same jobs with two model chunks a stage, and with 16 windows a step: both ours, with less of a bubble."""
WINDOWS = tuple(
    _setting("7B", window, 8, 2, 4, 1, speedup)
    for window, speedup in ((32, None), (64, None), (96, None), (128, 1.33), (160, 1.40))
)
"""Speed-up by window. The layout of 7B-128K throughout is ours: the paper does not give it."""
BREAKDOWN_OF = CONFIGURATIONS[3]
SHARDING_OF = _setting("7B", 128, 8, 4, 4, 1)
LARGE_JOB = _setting("405B", 128, 8, 16, 16, 4)
"""8,192 GPUs; the paper shows such a job's latency of each GPU, without its layout, which is ours."""

MEAN = {"all": 1.23, "64K": 1.15, "128K": 1.30}
"""Mean speed-up over plain 4D: of all configurations, and by window."""
OVER_FIXED = 1.19
BREAKDOWN = {"per-document": 1.02, "adaptive": 1.05, "packing and delay": 1.28, "all": 1.33}
IMBALANCE = {
    "original": 1.44,
    "fixed-greedy over 1": 1.41,
    "fixed-greedy over 2": 1.22,
    "fixed-greedy over 4": 1.11,
    "fixed-greedy over 8": 1.08,
    "WLB-LLM, 1 queue": 1.24,
    "WLB-LLM, 2 queues": 1.05,
    "WLB-LLM, 3 queues": 1.05,
}
"""Max/mean latency of micro-batches, 7B-128K, 4 micro-batches."""
SHARDING = {"adaptive over per-sequence": 1.075, "adaptive over per-document": 1.034}
"""Of a context-parallel layer at CP=4."""
