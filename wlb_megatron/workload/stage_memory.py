"""What each model chunk of a pipeline stage holds, kept or recomputed: for plans of what a step recomputes.

As in memory.py, whole bytes for each token that a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from wlb_megatron.workload.memory import (
    ATTENDS,
    WHOLE,
    WHOLE_NET,
    Layout,
    Model,
    apart_bytes,
    attended_bytes,
    attention_bytes,
    attention_parameters,
    busy_bytes,
    ends_bytes,
    ffn_parameters,
    gathered_keys_bytes,
    is_last,
    kept_bytes_of,
    keyed_layers,
    kv_elements,
    layers_bytes,
    output_bytes,
    spread_elements,
    symbols,
    unit_bytes,
    waiting_loss_bytes,
)


class UnlikeLayer(NamedTuple):
    """A layer of a HybridModel, which is attention, an MLP or experts alone.

    Args:
        kept: bytes for each token held, if it is not recomputed.
        linear: thousandths of the linear work of a layer that is attention and a feed-forward part.
        attends: The work that grows with the square of a document's length is this layer's.
    """

    kept: int
    linear: int
    attends: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChunk:
    """One model chunk (virtual stage) of a pipeline stage, in bytes for each token held of a micro-batch.

    Args:
        layers: How many the chunk has.
        recomputed: How many of them the user's flags recompute.
        kept: Bytes of a layer that is kept, the largest if they differ.
        input: Bytes of a layer that is recomputed alone.
        floor: Bytes of all layers by the user's flags.
        switched: Bytes that the first layer kept beyond the flags adds besides, because another method of recomputation
            then runs (uniform units, multi-token prediction).
        forward: Bytes of the layer at work in a forward.
        working: The same in a backward.
        remade: Bytes that a backward by the flags needs beside `working` if it begins with recomputed layers, which
            keep them until it has passed. One that begins with a kept layer has freed it before a layer is made again.
        keyed: Layers with keys, those of multi-token prediction among them.
        unlike: Every layer in order, if they differ.
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
    keyed: int = 0
    unlike: tuple[UnlikeLayer, ...] = ()

    def more(self) -> list[int]:
        """Bytes for each token held that 0, 1, .. of the recomputed layers add if they are kept, the last one first."""
        if not self.unlike:
            return [number * (self.kept - self.input) for number in range(self.recomputed + 1)]
        kept = [layer.kept - self.input for layer in self.unlike[: self.recomputed]]
        return [0, *accumulate(reversed(kept))]

    def saved(self) -> list[tuple[int, int]]:
        """Thousandths of a micro-batch's linear and quadratic work that keeping 0, 1, .. of these layers saves."""
        if not self.unlike:
            return [(1000 * number, 1000 * number) for number in range(self.recomputed + 1)]
        layers = self.unlike[: self.recomputed][::-1]
        linear = accumulate(layer.linear for layer in layers)
        return [(0, 0), *zip(linear, accumulate(1000 * layer.attends for layer in layers), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """A pipeline stage, in bytes for each token held.

    Args:
        chunks: Its model chunks.
        ends: Bytes outside the layers (token ids, what waits for a deferred loss).
        loss: Bytes of logits and loss at work.
        keys: Bytes of each layer, for a token of a document in chunks, whose keys later chunks read.
        attended: Bytes that a layer at work needs for each earlier token of such a document.
    """

    chunks: tuple[ModelChunk, ...]
    ends: int = 0
    loss: int = 0
    keys: int = 0
    attended: int = 0


def stage_memory(
    shape: Model,
    layout: Layout,
    stage: int,
    layers: Sequence[int | str],
    *,
    depths: int | str = 0,
) -> StageMemory:
    """What stage `stage` holds. layers: of each of its model chunks, of a HybridModel their symbols. depths: layers of
    multi-token prediction, on the last chunk of the last stage. Raises ValueError if the flags recompute no layers in
    full.
    """
    if layout.recompute != "full":
        raise ValueError(f"recomputation of {layout.recompute!r} has no number of layers to plan")
    last = is_last(layout, stage)
    further = [""] * (len(layers) - 1) + [symbols(depths) if last else ""]
    chunks = tuple(
        _chunk(shape, layout, symbols(chunk), more) for chunk, more in zip(layers, further, strict=True)
    )
    held_keys = kv_elements(shape, layout) * (shape.dtype_bytes + max(4, shape.dtype_bytes))
    # cuDNN's gradients are made for rounded counts of keys: 40,844 are 65,536.
    apart = 3 * layout.context * apart_bytes(shape, layout) // 2
    return StageMemory(
        chunks=chunks,
        ends=ends_bytes(shape, layout, stage) + waiting_loss_bytes(shape, layout, stage),
        loss=output_bytes(shape, layout) if last else 0,
        keys=held_keys,
        attended=attended_bytes(shape, layout) + apart,
    )


def _chunk(shape: Model, layout: Layout, layers: str, depths: str) -> ModelChunk:
    keys = gathered_keys_bytes(shape, layout)
    first_input = spread_elements(shape.hidden, layout) * shape.dtype_bytes
    kept = {symbol: kept_bytes_of(symbol, shape, layout) for symbol in sorted({*layers, *depths})}
    further = sum(kept[symbol] for symbol in depths)
    floor = layers_bytes(layers, shape, layout)
    if layout.recompute_block:
        recomputed = min(layout.recompute_layers, len(layers))
        floor, switched = floor + further, 0
    else:
        recomputed = len(layers)
        floor += len(depths) * first_input
        # Blocks keep an input for each layer, not for each unit, and all of multi-token prediction.
        switched = recomputed * first_input + further - floor
    begins_kept = len(layers + depths) > recomputed and layout.recompute_block
    forward = max(busy_bytes(shape, layout, symbol) + keys * (symbol in ATTENDS) for symbol in kept)
    # Gradients of a layer take what its activations do; sequence parallelism gathers an input and a gradient. Keys are
    # gathered again where they are not kept.
    at_work = forward + 2 * shape.hidden * shape.dtype_bytes + keys * (not layout.keep_keys)
    attention = attention_bytes(layers + depths, shape, layout) - keys * layout.keep_keys
    return ModelChunk(
        layers=len(layers),
        recomputed=recomputed,
        kept=max(kept.values()),
        input=first_input,
        floor=floor,
        switched=switched,
        forward=forward,
        working=max(at_work, attention),
        remade=0 if begins_kept else unit_bytes(layers, shape, layout),
        keyed=keyed_layers(layers + depths),
        unlike=() if {*layers} <= {WHOLE} else _unlike(layers, kept, shape),
    )


def _unlike(layers: str, kept: Mapping[str, int], shape: Model) -> tuple[UnlikeLayer, ...]:
    """The layers of a chunk of several kinds. Their parameters share out the linear work of as many whole layers as
    there are layers with attention: of *--, with 1 and twice 2 million parameters, the thousandths 200, 400 and 400."""
    experts = shape.experts
    routed = 0 if experts is None else ffn_parameters(shape, experts.shared + experts.chosen * experts.ffn)
    parameters = {"*": attention_parameters(shape), "-": ffn_parameters(shape, shape.ffn), "E": routed}
    parameters["G"] = shape.delta_nets.work(shape.hidden) if shape.delta_nets else 0
    feed_forward = parameters["-" if experts is None else "E"]
    parameters |= {WHOLE: parameters["*"] + feed_forward, WHOLE_NET: parameters["G"] + feed_forward}
    total = sum(parameters[symbol] for symbol in layers)
    attention = max(1, keyed_layers(layers))
    return tuple(
        UnlikeLayer(kept[symbol], 1000 * attention * parameters[symbol] // total, symbol in ATTENDS)
        for symbol in layers
    )
