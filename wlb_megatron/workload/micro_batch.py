"""What a micro-batch costs by itself, whatever documents it holds: fixed kernels of a layer, and the host's launches.

Ratios to a token's linear work are the same for one layer as for a stage of many, so all is counted for one layer.
"""

from __future__ import annotations

from wlb_megatron.workload.cost_model import MATRIX_FLOPS

MICRO_BATCH_TOKENS = 1000.0
"""What a micro-batch adds on each context-parallel rank where no model is known (tokens of linear work)."""

FIXED_NS = 600e3
"""A layer's time, forward + backward, at a micro-batch of next to no tokens (ns). On H100 and H200 0.39 to 0.44 ms
outside attention and 0.15 to 0.26 ms of attention's calls (profiles in docs/results)."""

LAUNCH_NS = (2.7e6, 3.3e6)
"""The host's time to launch a layer's forward and its backward (ns), on an H200's host (docs/results)."""


def launch_ns(recompute: bool) -> float:
    """Of a layer, both ways. recompute: the whole forward is launched again in the backward."""
    forward, backward = LAUNCH_NS
    return (1 + recompute) * forward + backward


def token_ns(parameters: float, recompute: bool) -> float:
    """Linear work of a token in a layer, both ways (ns). parameters: of the layer on one tensor-parallel rank."""
    return (8 if recompute else 6) * parameters / MATRIX_FLOPS * 1e9
