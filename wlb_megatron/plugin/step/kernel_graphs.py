"""Kernels built before step 1, within a budget of time: the likeliest first, the others when a step needs them.

FlashAttention-4 compiles one for each kind of call, some seconds each: a handful. cuDNN makes a graph for each size, in
about 0.13 s (H100). A model of windows of 128K has some hundred, of 1M with sliding windows thousands, most of which no
step will ever need; one that is not built here costs its time once, in the step that first meets it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from wlb_megatron.attention.kernels.before_training import (
    Bucket,
    Equal,
    Warmable,
    by_likelihood,
    foreseen,
    repeated,
)
from wlb_megatron.plugin.micro_batches.planning import ShardSettings
from wlb_megatron.registry import KERNELS, SHARDINGS, builds_by_size
from wlb_megatron.sharding.attention_calls import AttentionLayout

MOST_CUT = 64
"""Segments with earlier keys that a rank is taken to have at most, where sharding cuts only what pays."""

_PRINT_EVERY = 15.0
"""Seconds between lines of progress."""


@dataclass(frozen=True)
class GraphSizes:
    """What a rank can meet: a micro-batch of at most so many tokens and documents, cut by `settings`.

    Args:
        window: tokens that it usually has.
        window_layout: this rank's layout of one document of a window, as which every long document comes in the end;
            None where it is not known.
        prefix: earlier tokens that its documents in chunks attend to at most, all together.
    """

    tokens: int
    window: int
    settings: ShardSettings
    documents: int
    window_layout: AttentionLayout | None = None
    prefix: int = 0

    @property
    def segments(self) -> int:
        """At most two of each document."""
        return 2 * self.documents

    @property
    def cut_segments(self) -> int:
        """Those with earlier keys."""
        return self.segments if self.settings.sharding == "per-document" else min(self.segments, MOST_CUT)

    @property
    def usual_tokens(self) -> int:
        return max(1, min(self.window, self.tokens) // self.settings.cp_size)

    @property
    def usual_segments(self) -> int:
        """Per document, a rank holds two of each; otherwise most documents are whole, on one rank."""
        share = 2.0 if self.settings.sharding == "per-document" else 1.0 / self.settings.cp_size
        return max(32, int(self.documents * min(1.0, self.window / self.tokens) * share))


SECONDS = 60.0
"""Time limit for building attention graphs before step 1. A step that needs another graph builds it in about 0.13 s."""


def build_graphs(chunks: list[Any], sizes: GraphSizes, seconds: float = SECONDS) -> int:
    """Build what the layers can meet, for at most `seconds` (one graph more, to be exact), and tell; returns how many.

    Ranks may stop after different graphs, for what is not built here is built later, by whoever needs it. But which
    calls go to the kernels for equal sequences is no matter of time, or a resumed run would not repeat bitwise: of
    these few all are built, or with 0 seconds none.
    """
    from megatron.training import print_rank_0

    start = last_line = time.perf_counter()
    graphs, built = likeliest_first(chunks, sizes), 0
    for module, graph in graphs:
        now = time.perf_counter()
        if now - start >= seconds and not (seconds and isinstance(graph[2], Equal)):
            break
        if now - last_line >= _PRINT_EVERY:
            print_rank_0(
                f"> wlb_megatron: {built} of {len(graphs)} attention kernels, {now - start:.0f} s .."
            )
            last_line = now
        module.warm_up([graph])
        built += 1
    if graphs:
        took = time.perf_counter() - start
        seconds_each = f", {took / built:.2f} s each" if built else ""
        remaining = "; others are built when a step needs them" if built < len(graphs) else ""
        print_rank_0(
            f"> wlb_megatron: {built} of {len(graphs)} attention kernels built in {took:.1f} s{seconds_each}{remaining}"
        )
    return built


def likeliest_first(chunks: list[Any], sizes: GraphSizes) -> list[tuple[Any, Warmable]]:
    """Every kernel that the model's layers can meet, with a layer of its kind: FlashAttention-4's, and cuDNN's graphs
    of a document of a window, whose layout comes again; then graphs of diagonals, rectangles and windows by turns,
    of each those nearest to usual sizes first.
    """
    from wlb_megatron.attention.core_attention import WlbCoreAttention, window_of

    kinds: dict[tuple[Any, ...], WlbCoreAttention] = {}
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, WlbCoreAttention):
                kinds.setdefault(module.kind, module)
    turns = []
    for (whose, windowed, *_), module in kinds.items():
        window = window_of(module.config) if windowed else None
        if builds_by_size(whose):
            if sizes.window_layout is not None:
                turns += [(-1, module, graph) for graph in repeated(sizes.window_layout, windowed=windowed)]
            graphs = foreseen(
                *(sizes.tokens, sizes.settings.cp_size, sizes.segments, sizes.cut_segments, window),
                whole_documents=not windowed,
                one_call=bool(SHARDINGS[sizes.settings.sharding].chooses),
                prefix=sizes.prefix,
            )
            for kind in by_likelihood(graphs, sizes.usual_tokens, sizes.usual_segments):
                turns += [(turn, module, graph) for turn, graph in enumerate(kind)]
        elif whose in KERNELS:
            turns += [(-1, module, kind) for kind in compiled(sizes, window)]
    return [(module, graph) for _, module, graph in sorted(turns, key=lambda entry: entry[0])]


MANY = 256
"""Sequences in a call, above which FlashAttention-4 looks them up in another way, and compiles for it."""


def compiled(sizes: GraphSizes, window: int | None) -> list[Warmable]:
    """A call of each kind that FlashAttention-4 compiles for: a layer's mask, and few or many sequences. A layer that
    sees whole documents has no `window`."""
    kinds = [(True, sizes.segments)]
    if window is None and (sizes.settings.cp_size > 1 or sizes.prefix):
        kinds.append((False, sizes.cut_segments))
    counts = [
        (causal, count) for causal, segments in kinds for count in (1, MANY + 1) if count <= max(1, segments)
    ]
    return [(causal, window, Bucket(count, 128, 128 if causal else 256)) for causal, count in counts]
