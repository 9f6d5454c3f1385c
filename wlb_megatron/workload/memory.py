"""Bytes of a model on a layout: for Lmax of the fullest GPU, for plans of recomputation of each model chunk.

Everything is counted in whole bytes. Where a plan decides, the count is an upper bound: every micro-batch in flight
is as long as Lmax, and every rank needs all keys. Per layer this is the formula of arXiv 2205.05198 (Korthikanti et
al., table 2), with separate query, key and FFN widths and without attention scores. Megatron prints the same for
ordinary attention heads and a plain FFN (megatron/training/theoretical_memory_usage.py).

Documents in chunks: a group of micro-batches that share a document is counted as a whole, what its micro-batches keep,
the keys that later chunks read, and the gradients of those keys. Only one micro-batch at a time has logits.

The margin covers what is not counted: the CUDA context, NCCL's buffers, libraries' workspaces (0.1 GiB on an H200),
fragmentation, rotary tables, biases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from wlb_megatron.workload.model import (
    ATTENDS,
    WHOLE,
    WHOLE_NET,
    Layout,
    Model,
    attention_parameters,
    ffn_parameters,
    keyed_layers,
    layer_count,
    symbols,
)

LEAST, MOST = (5, 4), 4
"""Windows of the shortest Lmax that packs uncut documents (a ratio), and of the longest that is of use."""

GIB = 1 << 30


def memory_needed(shape: Model, layout: Layout, tokens: int) -> int:
    """Bytes on the fullest GPU when no micro-batch is longer than `tokens` (over all context-parallel ranks)."""
    held = -(-tokens // layout.context)
    return max(
        weight_bytes(shape, layout, stage) + held * token_bytes(shape, layout, stage)
        for stage in ends(layout)
    )


def weight_bytes(shape: Model, layout: Layout, stage: int) -> int:
    """Weights, their gradients in fp32, Adam's two states, and an fp32 copy of weights that are not.

    bf16: 2 + 4 + 12 bytes a parameter, the 12 spread over data x context ranks by the distributed optimizer, all 18
    by FSDP. An expert's are spread over the ranks that hold a copy of it. Unfused, the gradients of all first matrices
    of a layer's experts are made before they are added. Other matrices' come one by one, less than a backward's slack.
    """
    experts = shape.experts
    attention, dense, routed = _layer_counts(shape)
    compressions = attention * shape.hidden * (shape.compressed or 0)  # which each tensor-parallel rank has
    split = attention * attention_parameters(shape) - compressions + dense * ffn_parameters(shape, shape.ffn)
    whole = (attention + dense + routed) * shape.hidden + compressions  # norms
    if shape.delta_nets:
        nets = sum(symbols(shape.layers).count(symbol) for symbol in f"G{WHOLE_NET}")
        split += nets * shape.delta_nets.parameters(shape.hidden)
        whole += nets * shape.hidden
    if experts is not None:
        split += routed * ffn_parameters(shape, experts.shared)
        whole += routed * shape.hidden * experts.count  # routers
    embeddings = (stage == 0) + is_last(layout, stage)
    if shape.tied and layout.pipeline == 1:
        embeddings = 1
    split += embeddings * shape.vocab * shape.hidden
    if is_last(layout, stage):  # multi-token prediction joins two rows into one
        split += (shape.losses - 1) * 2 * shape.hidden**2
    whole += is_last(layout, stage) * shape.hidden
    copies = layout.data * layout.context
    total = _state_bytes(-(-split // layout.tensor) + whole, copies, shape, layout)
    if experts is not None:
        on_rank = -(-experts.count // experts.parallel)
        parameters = routed * on_rank * -(-ffn_parameters(shape, experts.ffn) // experts.tensor)
        first = on_rank * -(-(1 + shape.gated) * shape.hidden * experts.ffn // experts.tensor)
        copies = max(1, copies * layout.tensor // (experts.parallel * experts.tensor))
        total += _state_bytes(parameters, copies, shape, layout)
        total += first * shape.dtype_bytes * (routed > 0 and not layout.fused)
    return total


def _layer_counts(shape: Model) -> tuple[int, int, int]:
    """Layers with attention, with an MLP and with experts; a GPTModel's each count twice."""
    whole, net, attention, dense, routed = (
        symbols(shape.layers).count(symbol) for symbol in f"{WHOLE}{WHOLE_NET}*-E"
    )
    with_experts = (whole + net) * (shape.experts is not None)
    return whole + attention, dense + whole + net - with_experts, routed + with_experts


def _state_bytes(parameters: int, copies: int, shape: Model, layout: Layout) -> int:
    """Bytes of weights, gradients and optimizer. parameters: one rank's. copies: ranks that hold the same ones."""
    held = shape.dtype_bytes + 4
    states = 8 + (4 if shape.dtype_bytes < 4 else 0)
    if layout.fully_sharded:
        # FSDP gathers a layer at work and the next one.
        layer = parameters // layer_count(shape.layers)
        return -(-parameters * (held + states) // copies) + 2 * layer * shape.dtype_bytes
    spread = copies if layout.distributed_optimizer else 1
    return parameters * held + -(-parameters * states // spread)


def token_bytes(shape: Model, layout: Layout, stage: int) -> int:
    """Most bytes that a stage needs at once for each token that a rank holds of a micro-batch.

    What micro-batches in flight keep, and what one of them needs beside.
    """
    return kept_bytes(shape, layout, stage) + working_bytes(shape, layout, stage)


def working_bytes(shape: Model, layout: Layout, stage: int) -> int:
    """Bytes for each token held of the micro-batch at work, beside what it keeps: the largest of a layer in its
    backward, its attention in it, and the logits with their loss."""
    chunks = model_chunks(shape, layout)
    layer = max(busy_bytes(shape, layout, symbol) for symbol in {*"".join(chunks)})
    keys = gathered_keys_bytes(shape, layout)
    # Gradients of a layer take what its activations do; sequence parallelism gathers an input and a gradient.
    working = layer + 2 * shape.hidden * shape.dtype_bytes + keys
    if not layout.keep_keys or layout.recompute != "none":
        working += keys  # gathered again
    working = max(working, attention_bytes("".join(chunks), shape, layout))
    if layout.recompute == "full":
        again = max(unit_bytes(chunk, shape, layout) for chunk in chunks)
        working += again - keys * layout.keep_keys
        working += sum(lingering_bytes(chunk, shape, layout) for chunk in chunks)
    logits = output_bytes(shape, layout) if is_last(layout, stage) else 0
    return max(working, logits)


def lingering_bytes(layers: str, shape: Model, layout: Layout) -> int:
    """What the recomputed layers of a virtual stage hold of the micro-batch whose backward was last.

    Megatron's token dispatcher refers to a tensor of the recomputed forward until the next one. That keeps a layer's
    input and the gradient of it.
    """
    if shape.experts is None:
        return 0
    recomputed = layers[: layout.recompute_layers] if layout.recompute_block else layers
    routed = sum(symbol in ("E", WHOLE, WHOLE_NET) for symbol in recomputed)
    return 2 * routed * spread_elements(shape.hidden, layout) * shape.dtype_bytes


def attention_bytes(layers: str, shape: Model, layout: Layout) -> int:
    """Bytes for each token held that the backward of a layer's attention needs beside what the layer keeps.

    With fewer heads of keys than of queries, cuDNN makes gradients of all gathered keys and values for each head of
    queries, twice in fp32. Beside them are their sums, and of this rank's tokens five rows as wide as its heads. The
    feed-forward's activations in the same layer are free by then. 0 if none of the layers has attention.
    """
    if not keyed_layers(layers):
        return 0
    width = -(-shape.heads // layout.tensor) * shape.head_dim
    keys = gathered_keys_bytes(shape, layout)
    rows = 5 * width * shape.dtype_bytes + layout.context * apart_bytes(shape, layout)
    rows += keys or kv_elements(shape, layout) * shape.dtype_bytes
    if not layout.keep_keys or layout.recompute != "none":
        rows += keys  # gathered again
    if keys and not layout.keep_keys:
        rows += 2 * width * shape.dtype_bytes  # the gradients of this rank's own keys, made meanwhile
    return rows - ffn_bytes(shape, layout) * ("*" not in layers)


def apart_bytes(shape: Model, layout: Layout) -> int:
    """Gradients of a key and its value for each head of queries; 0 where each has keys of its own."""
    return 16 * -(-shape.heads // layout.tensor) * shape.head_dim * (shape.kv_heads < shape.heads)


def kept_bytes(shape: Model, layout: Layout, stage: int) -> int:
    """Bytes kept from forward to backward for each token held, over all micro-batches in flight on a stage."""
    flight, micro_batches = chunks_in_flight(layout, stage), micro_batches_in_flight(layout, stage)
    return flight * chunk_bytes(shape, layout) + micro_batches * ends_bytes(shape, layout, stage)


def micro_batch_bytes(shape: Model, layout: Layout, stage: int) -> int:
    """Of that, what one micro-batch keeps: all model chunks of the stage."""
    return layout.virtual * chunk_bytes(shape, layout) + ends_bytes(shape, layout, stage)


def ends_bytes(shape: Model, layout: Layout, stage: int) -> int:
    """Kept for each token held outside the layers."""
    ids = 28  # tokens, labels and positions in int64, loss mask in fp32
    return ids + (spread_elements(shape.hidden, layout) if shape.dropout and (stage == 0) else 0)


def logits_bytes(shape: Model, layout: Layout) -> int:
    """Final norm's input and output, logits, and their fp32 copy of which the loss makes its gradient."""
    norm = 2 * spread_elements(shape.hidden, layout) * shape.dtype_bytes
    return shape.losses * (norm + -(-shape.vocab // layout.tensor) * (shape.dtype_bytes + 4))


def output_bytes(shape: Model, layout: Layout) -> int:
    """Logits, and beside them what the output layer gathered and the next two tensors that stages send each other."""
    gathered = shape.hidden * (layout.sequence and layout.tensor > 1)
    sent = 2 * spread_elements(shape.hidden, layout) * (layout.pipeline > 1)
    return logits_bytes(shape, layout) + (gathered + sent) * shape.dtype_bytes


def waiting_loss_bytes(shape: Model, layout: Layout, stage: int) -> int:
    """What the end of the last stage keeps for each token held of a group of micro-batches that share a document.

    The final norm's input and output of each loss; with several, their outputs once more, as one tensor. The output
    layer and the losses run right before the backward. A loss that runs in the forward keeps its softmax in fp32.
    """
    if not is_last(layout, stage):
        return 0
    norm = (2 + (shape.losses > 1)) * spread_elements(shape.hidden, layout) * shape.dtype_bytes
    return shape.losses * (norm + (4 * -(-shape.vocab // layout.tensor) if layout.losses_in_forward else 0))


def chunks_in_flight(layout: Layout, stage: int) -> int:
    """Virtual stages' forwards that a pipeline stage holds at most before a backward frees one.

    1F1B: stages ahead of the end, at most the micro-batches: PP 4 holds 4, 3, 2, 1. Interleaved, PP 4 with 2 virtual
    stages holds 2 x 3 + 4 + 1 = 11 of half the layers, 5.5 micro-batches' worth.
    """
    behind = layout.pipeline - 1 - stage
    if layout.virtual == 1:
        return min(behind + 1, layout.micro_batches)
    most = 2 * behind + (layout.virtual - 1) * max(layout.group or 1, layout.pipeline) + 1
    return min(most, layout.micro_batches * layout.virtual)


def micro_batches_in_flight(layout: Layout, stage: int = 0) -> int:
    """The same in micro-batches, rounded up: PP 4 with 2 virtual stages holds 6 on the first stage."""
    return -(-chunks_in_flight(layout, stage) // layout.virtual)


def model_chunks(shape: Model, layout: Layout) -> list[str]:
    """The layers of each virtual stage by their symbols; one stands for all where layers are alike."""
    if isinstance(shape.layers, str):
        return shape.layers.split("|")
    return [symbols(-(-shape.layers // layout.virtual))]


def chunk_bytes(shape: Model, layout: Layout) -> int:
    """What the layers of one virtual stage, the fullest, keep for a token held."""
    return max(layers_bytes(chunk, shape, layout) for chunk in model_chunks(shape, layout))


def layers_bytes(layers: str, shape: Model, layout: Layout) -> int:
    """What these layers of a virtual stage keep for a token held, recomputed by the flags."""
    first_input = spread_elements(shape.hidden, layout) * shape.dtype_bytes
    recomputed = 0
    if layout.recompute == "full":
        recomputed = min(layout.recompute_layers, len(layers)) if layout.recompute_block else len(layers)
    unit = 1 if layout.recompute_block else layout.recompute_layers
    return -(-recomputed // unit) * first_input + sum(
        layers.count(symbol, recomputed) * kept_bytes_of(symbol, shape, layout) for symbol in {*layers}
    )


def kept_bytes_of(symbol: str, shape: Model, layout: Layout) -> int:
    """What a layer that is not recomputed keeps for a token held, with the keys that it has gathered."""
    gathers = layout.keep_keys and layout.recompute != "selective" and symbol in ATTENDS
    keys = gathered_keys_bytes(shape, layout) * gathers
    return layer_bytes(shape, layout, symbol) + keys


def unit_bytes(layers: str, shape: Model, layout: Layout) -> int:
    """What the layers keep that a backward makes again at once: one of a block, else those of the fullest unit."""
    unit = 1 if layout.recompute_block else layout.recompute_layers
    each = {symbol: kept_bytes_of(symbol, shape, layout) for symbol in {*layers}}
    units = (layers[start : start + unit] for start in range(0, len(layers), unit))
    return max((sum(each[symbol] for symbol in layers) for layers in units), default=0)


def layer_bytes(shape: Model, layout: Layout, symbol: str = WHOLE) -> int:
    """Activations of a layer for a token held, without gathered keys. symbol: its kind, in a HybridModel's pattern.

    Elements, plain heads, ffn 4h: inputs of two norms and of the two matrices behind them 4h; q, k, v 3h, attention's
    output 1h; FFN's first output 4h and second input 4h. In 2 bytes 32h, and 2h of dropout masks: the paper's 34h.
    Each expert that a token passes has its own FFN and its own copy of the input, which expert-tensor-parallel ranks
    gather. Routing keeps 12 bytes for each expert (scores, sorted places) and 30 for each of those that a token passes.
    """
    b, tp = shape.dtype_bytes, layout.tensor
    norm = spread_elements(shape.hidden, layout) * (2 * b + shape.dropout)
    heads = -(-shape.heads // tp)
    attention = heads * (2 * shape.head_dim * b + 4)  # q, output; log-sum-exp in fp32
    attention += kv_elements(shape, layout) * b + norm
    if shape.qk_norm and shape.projections is None:  # the inputs of the norms of queries and keys
        attention += heads * shape.head_dim * b + kv_elements(shape, layout) * b // 2
    if shape.compressed is not None:  # the inputs of their norms, and the outputs
        attention += 2 * spread_elements(shape.compressed, layout) * b
    feed_forward = ffn_bytes(shape, layout, symbol) + norm
    parts = {"*": attention, WHOLE: attention + feed_forward}
    if nets := shape.delta_nets:
        net = -(-(nets.elements() * b + 20 * nets.value_heads) // tp) + norm  # decay and beta, partly in fp32
        parts |= {"G": net, WHOLE_NET: net + feed_forward}
    return parts.get(symbol, feed_forward)


def busy_bytes(shape: Model, layout: Layout, symbol: str) -> int:
    """What a layer holds for a token held while it runs, without gathered keys. That is what it keeps (or gradients of
    as much), or more of rows that experts pass on: Megatron refers to those that it sends and receives until their
    outputs are sorted, which takes two more."""
    layer, experts = layer_bytes(shape, layout, symbol), shape.experts
    if shape.delta_nets is not None and symbol in ("G", WHOLE_NET):
        layer += -(-shape.delta_nets.elements_at_work() // layout.tensor) * shape.dtype_bytes
    if experts is None or symbol in "*-G":
        return layer
    row = experts.chosen * shape.hidden * shape.dtype_bytes
    rows = 100 + (1 + 2 * experts.tensor) * experts.imbalance
    return max(layer, -(-row * rows // (100 * layout.tensor)))


def ffn_bytes(shape: Model, layout: Layout, symbol: str = WHOLE) -> int:
    """Of that, the feed-forward's or the experts', without its norm."""
    b, tp, experts = shape.dtype_bytes, layout.tensor, shape.experts
    matrices = 3 if shape.gated else 2
    if experts is None or symbol == "-":
        return -(-shape.ffn // tp) * matrices * b
    routing = spread_elements(12 * experts.count + 30 * experts.chosen, layout)
    row = -(-(matrices * experts.ffn + experts.tensor * shape.hidden) // tp)
    routed = -(-row * experts.chosen * b * experts.imbalance // 100)
    return -(-experts.shared // tp) * matrices * b + routing + routed


def gathered_keys_bytes(shape: Model, layout: Layout) -> int:
    """Gathered keys and values of a layer for a token held: at most those of the whole micro-batch."""
    return layout.context * kv_elements(shape, layout) * shape.dtype_bytes if layout.context > 1 else 0


def kv_elements(shape: Model, layout: Layout) -> int:
    """Elements of a token's keys and values in a layer, on one rank."""
    return 2 * -(-shape.kv_heads // layout.tensor) * shape.head_dim


def spread_elements(elements: int, layout: Layout) -> int:
    """Elements on a rank of what only sequence parallelism divides over tensor-parallel ranks."""
    return -(-elements // layout.tensor) if layout.sequence else elements


def ends(layout: Layout) -> tuple[int, ...]:
    """The stages that can be fullest: the first holds most micro-batches, the last the logits."""
    return tuple(sorted({0, layout.pipeline - 1}))


def is_last(layout: Layout, stage: int) -> bool:
    return stage == layout.pipeline - 1


def keys_bytes(shape: Model, layout: Layout) -> int:
    """Bytes that a stage keeps for each token held of a document in chunks: keys and values of all its layers, and
    their gradients, which are summed in fp32 at least (attention/kv_exchange.py)."""
    return keyed_layers(shape.layers) * _layer_keys_bytes(shape, layout)


def _layer_keys_bytes(shape: Model, layout: Layout) -> int:
    return kv_elements(shape, layout) * (shape.dtype_bytes + max(4, shape.dtype_bytes))


def attended_bytes(shape: Model, layout: Layout) -> int:
    """Bytes that a layer at work needs for each token held of the document: own keys beside kept ones, and on a rank
    that sees the document of all context-parallel ranks its keys with their gradients."""
    return kv_elements(shape, layout) * shape.dtype_bytes * (1 + 2 * layout.context)


def chunked_bytes(shape: Model, layout: Layout, *, longest: int, held: int, document: int) -> int:
    """Bytes on the fullest GPU (tokens are over all context-parallel ranks).

    `longest` are a micro-batch's tokens, `held` those of all micro-batches that a stage holds at once, and `document`
    those of the longest document in chunks.
    """
    return max(chunked_stage_bytes(shape, layout, stage, longest, held, document) for stage in ends(layout))


def chunked_stage_bytes(
    shape: Model, layout: Layout, stage: int, longest: int, held: int, document: int
) -> int:
    """The same of one stage."""
    at_work, kept, keys = (-(-tokens // layout.context) for tokens in (longest, held, document))
    return (
        weight_bytes(shape, layout, stage)
        + at_work * working_bytes(shape, layout, stage)
        + kept * (micro_batch_bytes(shape, layout, stage) + waiting_loss_bytes(shape, layout, stage))
        + keys * (keys_bytes(shape, layout) + attended_bytes(shape, layout))
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
    """What stage `stage` holds. layers: each of its model chunks', a HybridModel's as symbols. depths: layers of
    multi-token prediction, on the last chunk of the last stage. Raises ValueError if the flags recompute no layers in
    full.
    """
    if layout.recompute != "full":
        raise ValueError(f"recomputation of {layout.recompute!r} has no number of layers to plan")
    last = is_last(layout, stage)
    further = [""] * (len(layers) - 1) + [symbols(depths) if last else ""]
    lingering = sum(lingering_bytes(symbols(chunk), shape, layout) for chunk in layers)
    chunks = tuple(
        _chunk(shape, layout, symbols(chunk), more, lingering)
        for chunk, more in zip(layers, further, strict=True)
    )
    # cuDNN's gradients are made for rounded counts of keys: 40,844 are 65,536.
    apart = 3 * layout.context * apart_bytes(shape, layout) // 2
    return StageMemory(
        chunks=chunks,
        ends=ends_bytes(shape, layout, stage) + waiting_loss_bytes(shape, layout, stage),
        loss=output_bytes(shape, layout) if last else 0,
        keys=_layer_keys_bytes(shape, layout),
        attended=attended_bytes(shape, layout) + apart,
    )


def _chunk(shape: Model, layout: Layout, layers: str, depths: str, lingering: int) -> ModelChunk:
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
        forward=forward + lingering,
        working=max(at_work, attention) + lingering,
        remade=0 if begins_kept else unit_bytes(layers, shape, layout),
        keyed=keyed_layers(layers + depths),
        unlike=() if {*layers} <= {WHOLE} else _unlike(layers, kept, shape),
    )


def _unlike(layers: str, kept: Mapping[str, int], shape: Model) -> tuple[UnlikeLayer, ...]:
    """The layers of a chunk of several kinds. Their parameters share out the linear work of as many whole layers as
    there are layers with attention. *-- with 1 and twice 2 million parameters: thousandths 200, 400 and 400."""
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
