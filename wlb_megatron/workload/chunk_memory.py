"""Estimates memory of steps with documents in chunks, and the longest document that can train whole.

A group of micro-batches that share a document is counted as a whole: what its micro-batches keep, the keys that later
chunks read, and the gradients of those keys. Only one micro-batch at a time has logits. As in memory.py, these are
upper bounds in whole bytes, per token that a rank holds.
"""

from __future__ import annotations

from wlb_megatron.workload.memory import (
    Layout,
    Model,
    ends,
    keyed_layers,
    kv_elements,
    micro_batch_bytes,
    waiting_loss_bytes,
    weight_bytes,
    working_bytes,
)


def keys_bytes(shape: Model, layout: Layout) -> int:
    """Bytes that a stage keeps for each token held of a document in chunks: keys and values of all its layers, and
    their gradients, which are summed in fp32 at least (attention/key_cache.py)."""
    return (
        keyed_layers(shape.layers)
        * kv_elements(shape, layout)
        * (shape.dtype_bytes + max(4, shape.dtype_bytes))
    )


def attended_bytes(shape: Model, layout: Layout) -> int:
    """Bytes that a layer at work needs for each token held of the document: own keys beside kept ones, and on a rank
    that sees the document of all context-parallel ranks its keys with their gradients."""
    return kv_elements(shape, layout) * shape.dtype_bytes * (1 + 2 * layout.context)


def chunked_bytes(shape: Model, layout: Layout, *, longest: int, held: int, document: int) -> int:
    """Bytes on the fullest GPU (tokens are over all context-parallel ranks).

    longest: of a micro-batch. held: of all micro-batches that a stage holds at once. document: of the longest one in
    chunks.
    """
    return max(_bytes(shape, layout, stage, longest, held, document) for stage in ends(layout))


def fit_chunks(
    shape: Model,
    layout: Layout,
    memory_bytes: int,
    *,
    margin: float = 0.10,
    held: int,
    document: int,
    alignment: int,
) -> int:
    """The longest micro-batch with chunks that fits (tokens over all context-parallel ranks, a multiple of alignment);
    0 where none does. held, document: see chunked_bytes."""
    room = int(memory_bytes * (1 - margin))
    fitting = [
        (room - _bytes(shape, layout, stage, 0, held, document)) // working_bytes(shape, layout, stage)
        for stage in ends(layout)
    ]
    return max(0, min(fitting) * layout.context // alignment * alignment)


def fit_document(
    shape: Model,
    layout: Layout,
    memory_bytes: int,
    *,
    margin: float = 0.10,
    longest: int,
    share: int,
) -> int:
    """Tokens of the longest document that fits, over all context-parallel ranks; 0 where none does.

    memory_bytes: of one GPU, of which the share `margin` is left free. longest: tokens of a micro-batch. share: tokens
    of a data-parallel rank in an iteration, all of which may be in flight beside the document.
    """
    room = int(memory_bytes * (1 - margin))
    fitting = []
    for stage in ends(layout):
        free = room - _bytes(shape, layout, stage, longest, share, 0)
        bytes_per_token = _bytes(shape, layout, stage, 0, 1, 1) - weight_bytes(shape, layout, stage)
        fitting.append(free // bytes_per_token * layout.context)
    return max(0, min(fitting))


def _bytes(shape: Model, layout: Layout, stage: int, longest: int, held: int, document: int) -> int:
    at_work, kept, keys = (-(-tokens // layout.context) for tokens in (longest, held, document))
    return (
        weight_bytes(shape, layout, stage)
        + at_work * working_bytes(shape, layout, stage)
        + kept * (micro_batch_bytes(shape, layout, stage) + waiting_loss_bytes(shape, layout, stage))
        + keys * (keys_bytes(shape, layout) + attended_bytes(shape, layout))
    )
