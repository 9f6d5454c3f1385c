"""What a micro-batch costs whatever documents it holds: fixed kernels of a layer, and the host's launches.

Ratios to a token's linear work are the same for one layer and for a stage of many. So all is counted for one layer.
"""

from __future__ import annotations

from wlb_megatron.workload.cost_model import MATRIX_FLOPS

MICRO_BATCH_TOKENS = 1000.0
"""What a micro-batch adds on each context-parallel rank if no model is known (tokens of linear work)."""

FIXED_NS = 600e3
"""A layer's time, forward + backward, for a micro-batch of almost no tokens (ns). On H100 and H200 it is 0.39 to 0.44
ms outside attention and 0.15 to 0.26 ms for attention's calls (profiles in docs/results)."""

LAUNCH_NS = (2.7e6, 3.3e6)
"""The host's time to launch a layer's forward and its backward (ns), on an H200's host (docs/results)."""

EXPERTS_NS, EXPERT_NS = (2.7e6, 2.8e6), (0.056e6, 0.094e6)
"""What a layer with experts, and each expert of a rank, add to that: from a Qwen3-30B-A3B layer with 16 and with 128
experts (docs/results/1x_h200/expert_layers.csv)."""

STAGE_NS = 18e6
"""The host's time per micro-batch on a pipeline stage outside its layers (ns), forward and backward: draws, transfers.
On four H200s, 4 layers a stage with full recompute, 33 steps of 4 to 24 micro-batches took 48 to 57 ms per micro-batch,
however few its tokens. The layers' launches are 35 of that (docs/results/4x_h200/micro_batches_first.csv). The host
still waited for the device at each transfer then, so this is at most what it takes now."""

CHUNK_NS = 0.65e6
"""What a layer's backward takes besides its kernels in a micro-batch that shares a document with others (ns). Earlier
keys are gathered again, and their gradients added. On two H200s, CP=1, 16 heads of 128 channels, 4 layers a stage,
220 backwards of 9K tokens took 2.2 to 3.7 ms more than predicted; those of whole documents took 0.0 more
(docs/simulation.md)."""

CHUNK_WIDTH = 2048
"""Heads x channels of a rank in that measurement."""


def chunk_ns(width: float, context_ranks: int) -> float:
    """The same on one of `context_ranks` ranks with heads x channels of `width`.

    It is assumed proportional to rows and heads, of which each rank has its share. Only one rank was measured.
    """
    return CHUNK_NS * width / CHUNK_WIDTH / context_ranks


def stage_launch_ns(
    launch: tuple[float, float], recompute: float, layers: float | None
) -> tuple[float, float]:
    """The host's time for a micro-batch's forward and backward, over the layers of its stage (ns).

    launch: a layer's forward and backward. recompute: share of the layers whose forward is launched again in the
    backward. layers: a pipeline stage's; None: no pipeline.
    """
    forward, backward = launch
    per_layer = STAGE_NS / layers / 2 if layers else 0.0
    return forward + per_layer, backward + recompute * forward + per_layer


def token_ns(parameters: float, recompute: float) -> float:
    """Linear work of a token in a layer, forward + backward (ns). parameters: the layer's on one tensor-parallel
    rank.
    """
    return (6 + 2 * recompute) * parameters / MATRIX_FLOPS * 1e9
