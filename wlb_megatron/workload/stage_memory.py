"""What each model chunk of a pipeline stage holds, kept or recomputed: for plans of what a step recomputes.

As in memory.py, whole bytes for each token that a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wlb_megatron.workload.chunk_memory import attended_bytes
from wlb_megatron.workload.memory import (
    Experts,
    ParallelLayout,
    StageShape,
    ends_bytes,
    gathered_keys_bytes,
    is_last,
    kv_elements,
    layer_bytes,
    logits_bytes,
    spread_elements,
    waiting_loss_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChunk:
    """One model chunk (virtual stage) of a pipeline stage, in bytes for each token held of a micro-batch.

    layers: of the chunk. depths: its layers of multi-token prediction besides. recomputed: how many of `layers` the
    user's flags recompute. kept, input: of a layer that is kept,
    and of one that is recomputed alone. floor: of all layers by the user's flags. switched: what the first layer that
    is kept beyond the flags adds besides, because another method of recomputation then runs (uniform units,
    multi-token prediction). forward, working: of the layer at work in a forward and in a backward. remade: what a
    backward by the flags needs beside `working`, if it begins with recomputed layers: what they keep until it has
    passed them. One that begins with a kept layer has freed it before a layer is made again.
    """

    layers: int
    recomputed: int
    kept: int
    input: int
    floor: int
    switched: int = 0
    forward: int = 0
    working: int = 0
    remade: int = 0
    depths: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """A pipeline stage. chunks: its model chunks.

    In bytes for each token held: ends: outside the layers (token ids, what waits for a deferred loss). loss: of logits
    and loss at work. keys: of each layer, for a token of a document in chunks, whose keys later chunks read. attended:
    what a layer at work needs for each earlier token of such a document.
    """

    chunks: tuple[ModelChunk, ...]
    ends: int = 0
    loss: int = 0
    keys: int = 0
    attended: int = 0


def stage_memory(
    shape: StageShape,
    layout: ParallelLayout,
    stage: int,
    layers: Sequence[int],
    *,
    depths: int = 0,
    experts: Experts | None = None,
) -> StageMemory:
    """What stage `stage` holds. layers: of each of its model chunks. depths: layers of multi-token prediction, on the
    last chunk of the last stage. Raises ValueError if the flags recompute no layers in full.
    """
    if layout.recompute != "full":
        raise ValueError(f"recomputation of {layout.recompute!r} has no number of layers to plan")
    last = is_last(layout, stage)
    further = [depths if last and number == len(layers) - 1 else 0 for number in range(len(layers))]
    chunks = tuple(
        _chunk(shape, layout, count, more, experts) for count, more in zip(layers, further, strict=True)
    )
    held_keys = kv_elements(shape, layout) * (shape.dtype_bytes + max(4, shape.dtype_bytes))
    return StageMemory(
        chunks=chunks,
        ends=ends_bytes(shape, layout, stage) + waiting_loss_bytes(shape, layout, stage),
        loss=logits_bytes(shape, layout) if last else 0,
        keys=held_keys,
        attended=attended_bytes(shape, layout),
    )


def _chunk(
    shape: StageShape, layout: ParallelLayout, layers: int, depths: int, experts: Experts | None
) -> ModelChunk:
    layer, keys = layer_bytes(shape, layout, experts), gathered_keys_bytes(shape, layout)
    first_input = spread_elements(shape.hidden, layout) * shape.dtype_bytes
    kept = layer + keys * layout.keep_keys
    unit = 1 if layout.recompute_block else min(layout.recompute_layers, layers)
    if layout.recompute_block:
        recomputed = min(layout.recompute_layers, layers)
        floor = recomputed * first_input + (layers - recomputed + depths) * kept
        switched = 0
    else:
        recomputed = layers
        floor = (-(-layers // unit) + depths) * first_input
        # Blocks keep an input for each layer, not for each unit, and all of multi-token prediction.
        switched = layers * first_input + depths * kept - floor
    begins_kept = layers + depths > recomputed and layout.recompute_block
    # Gradients of a layer take what its activations do; sequence parallelism gathers an input and a gradient. Keys are
    # gathered again where they are not kept.
    at_work = layer + 2 * shape.hidden * shape.dtype_bytes + keys
    return ModelChunk(
        layers=layers,
        recomputed=recomputed,
        kept=kept,
        input=first_input,
        floor=floor,
        switched=switched,
        forward=layer + keys,
        working=at_work + keys * (not layout.keep_keys),
        remade=0 if begins_kept else unit * kept,
        depths=depths,
    )
