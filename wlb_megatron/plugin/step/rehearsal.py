"""One forward and backward of the longest micro-batches before step 1.

It takes the memory that any later step can need, so that the order of micro-batches is free after that and a run
that does not fit ends now, not at a step that happens to draw long ones. Before it, kernel graphs of the sizes that
micro-batches can have are built. Gradients are cleared and all other state is put back (unchanged), and Megatron's
checks of losses and gradients are off: training goes on as if nothing had been.

Kernels are built within a budget of time: the likeliest first, the others when a step needs them. FlashAttention-4
compiles one for each kind of call, some seconds each: a handful. cuDNN makes a graph for each size, in about 0.13 s
(H100). A model of windows of 128K has some hundred, of 1M with sliding windows thousands, most of which no step will
ever need; one that is not built here costs its time once, in the step that first meets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import get_args, print_rank_0
from torch import Tensor

from wlb_megatron.attention.kernels.before_training import (
    Bucket,
    Equal,
    Warmable,
    by_likelihood,
    foreseen,
    repeated,
)
from wlb_megatron.documents.blend import Blend
from wlb_megatron.plan import IterationPlan, MicroBatch, Piece, PlanSummary
from wlb_megatron.plugin.flags.refusal_printing import checked
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.micro_batches.loaded import HeldTokens, Layout, LoadedMicroBatch, from_plan
from wlb_megatron.plugin.micro_batches.planning import ShardSettings, cut_plan
from wlb_megatron.plugin.step.losses import unchecked
from wlb_megatron.plugin.step.recomputation import Recomputation, by_the_flags
from wlb_megatron.refusals import RefusedHere
from wlb_megatron.registry import KERNELS, SHARDINGS, builds_by_size
from wlb_megatron.sharding.attention_calls import AttentionLayout, attention_layout
from wlb_megatron.sharding.cut import cut
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN

REHEARSAL = -1
"""Iteration number of a rehearsed micro-batch."""

MOST_READ = 4096
"""Documents read for it at most, however short they are."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What runs before step 1.

    batches: those of one step; a single one stands for as many as the schedule takes. sizes: those to build kernel
    graphs for.
    """

    batches: tuple[LoadedMicroBatch, ...]
    sizes: GraphSizes


def longest_micro_batches(
    max_tokens: int,
    window: int,
    settings: ShardSettings,
    layout: Layout,
    corpus: Blend,
    documents: int = 1,
    chunked: tuple[int, int] = (0, 0),
    count: int = 1,
) -> Rehearsal:
    """A batch of max_tokens as documents of one window, cut per document: every rank needs all keys.

    The tokens are the corpus's.

    Args:
        documents: how many a micro-batch of max_tokens may hold.
        chunked: micro-batches that run forward before the first backward: so many batches, of which the first are a
            document of so many tokens in chunks. With 0 one batch stands for all of the schedule's.
        count: the schedule takes a multiple of so many batches, and the shortest ones fill up.
    """
    usable, (in_flight, longest_document) = max_tokens // settings.alignment * settings.alignment, chunked
    rows = in_chunks(usable, in_flight, longest_document) if in_flight > 1 else [_of_windows(usable, window)]
    together = (in_flight, *(1 for _ in range(-in_flight % count))) if in_flight > 1 else ()
    rows += [(Piece(0, 1 + number, 0, settings.alignment),) for number in range(in_flight, sum(together))]
    work = [UNITS_PER_TOKEN * sum(piece.tokens for piece in pieces) for pieces in rows]
    micro_batches = tuple((MicroBatch(*row),) for row in zip(rows, work, strict=True))
    plan = IterationPlan(REHEARSAL, (), micro_batches, ())
    summary = PlanSummary(REHEARSAL, usable, len(rows[0]), usable, 1.0, 1.0, 1.0, 1, 0, 0.0, 0, 0)
    counts = (usable,) * (1 + layout.follows)
    graphs = GraphSizes(
        *(usable, window, settings, documents, _of_a_window(window, settings, layout)),
        prefix=longest_document if in_flight > 1 else 0,  # of a document up to its last chunk
    )
    # The plan is of this rank alone, whatever its number, and its documents are not the corpus's.
    cut_settings = replace(settings, dp_rank=0, sharding="per-document", in_step=False, predict=None)
    cut_settings = replace(cut_settings, predictions=lambda _: counts)
    batches = []
    for micro_batch in cut_plan(cut_settings, plan, summary, time.perf_counter()).micro_batches:
        batch = from_plan(replace(micro_batch, chunk_groups=together), layout)
        if layout.reads_tokens:
            batch = batch._replace(held=_read(micro_batch.shard, corpus, layout, settings.dp_rank))
        batches.append(batch)
    return Rehearsal(tuple(batches), graphs)


def in_chunks(tokens: int, count: int, document: int) -> list[tuple[Piece, ...]]:
    """`count` micro-batches of so many tokens, of which the first hold a `document` of so many ones in chunks.

    4 tokens, 3 micro-batches, a document of 6: (0, 4) | (4, 6) (0, 2) | (0, 4).
    """
    rows: list[tuple[Piece, ...]] = []
    for number in range(count):
        start, end = number * tokens, min((number + 1) * tokens, document)
        chunk = (Piece(0, 0, start, end, start),) if start < end else ()
        remaining = tokens - sum(piece.tokens for piece in chunk)
        rows.append((*chunk, Piece(0, 1 + number, 0, remaining)) if remaining else chunk)
    return rows


def _of_windows(tokens: int, window: int) -> tuple[Piece, ...]:
    sizes = [window] * (tokens // window) + [tokens % window] * (tokens % window > 0)
    return tuple(Piece(0, document, 0, size) for document, size in enumerate(sizes))


def _read(plan: ShardPlan, corpus: Blend, layout: Layout, seed: int) -> HeldTokens:
    """Tokens of the corpus, each of which predicts the next ones."""
    rows = np.arange(1 + layout.follows)[:, None]
    index = plan.packed_index(layout.cp_rank)
    ids = torch.from_numpy(text(corpus, plan.tokens + len(rows), seed, layout.vocabulary))
    return HeldTokens(
        tokens=ids[index + rows],
        labels=ids[index + rows + 1],
        loss_mask=torch.ones(len(rows), len(index)),
        position_ids=torch.from_numpy(plan.positions(layout.cp_rank) + rows * 0),
        predicted=float(len(index)),
    )


def _of_a_window(window: int, settings: ShardSettings, layout: Layout) -> AttentionLayout | None:
    """This rank's layout of one document of a window; None where padding would come with it."""
    if window % settings.alignment:
        return None
    lengths = [np.array([window], dtype=np.int64)]
    (plan,) = cut(lengths, settings.cp_size, settings.sharding, settings.table)
    return attention_layout(plan, layout.cp_rank, layout.window)


def text(corpus: Blend, tokens: int, seed: int, vocabulary: int | None) -> np.ndarray:
    """int64[tokens] of documents drawn at random, one after the other; over again where the corpus has fewer.

    Routers then choose experts as they do in training. Of one token repeated, all would go to the same experts, and
    with expert parallelism a rank would get every rank's tokens. Ids without a row in the embedding become its last
    one: they are reported where they train.
    """
    texts, drawn_tokens = [np.zeros(0, dtype=np.int64)], 0
    for document in np.random.default_rng(seed).integers(corpus.first_ids[-1], size=MOST_READ).tolist():
        if drawn_tokens == tokens:
            break
        texts.append(corpus.read(document, 0, min(corpus.length(document), tokens - drawn_tokens)))
        drawn_tokens += len(texts[-1])
    ids = np.resize(np.concatenate(texts), tokens)
    return ids if vocabulary is None else ids.clip(0, vocabulary - 1)


def same_again(batch: LoadedMicroBatch, count: int) -> tuple[LoadedMicroBatch, ...]:
    """The batch in every place of a step of `count` micro-batches."""
    micro_batch = replace(batch.planned, steps=count, loads=batch.planned.loads * count)
    return tuple(batch._replace(planned=replace(micro_batch, index=number)) for number in range(count))


def rehearse(step: Callable[[], Any], chunks: list[Any], rehearsal: Rehearsal) -> None:
    """Build kernels, run `step` (a forward and backward of all micro-batches) and undo what it left behind.

    RefusedHere with one line where the GPU's memory does not suffice.
    """
    with unchanged(chunks):
        build_graphs(chunks, rehearsal.sizes)
        with unchecked():
            with by_the_flags():
                checked(partial(_fitting, step, rehearsal))
            if part(Recomputation).gpu is not None:
                checked(partial(_fitting, step, rehearsal, layers_kept=True))
        for chunk in chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.grad = None  # where FSDP2 keeps it


def _fitting(step: Callable[[], Any], rehearsal: Rehearsal, *, layers_kept: bool = False) -> None:
    try:
        step()
    except torch.OutOfMemoryError as error:
        if layers_kept:
            raise RefusedHere(
                "the fullest step fits the GPU with the flags of recomputation, but not with the layers "
                "that it was planned to keep: raise --wlb-memory-margin, or set --wlb-recompute off "
                f"({str(error).splitlines()[0]})"
            ) from None
        plans = [(batch.planned.shard, batch.layout.cp_rank) for batch in rehearsal.batches]
        tokens = max(plan.tokens for plan, _ in plans)
        size = max(plan.tokens_per_rank[rank] for plan, rank in plans)
        raise RefusedHere(
            f"micro-batches of {tokens:,} tokens, of which this rank holds {size:,}, do not fit the GPU, "
            "and training would come to them: lower --wlb-max-tokens, add --wlb-regather-keys, or recompute "
            f"activations ({str(error).splitlines()[0]})"
        ) from None


@contextmanager
def unchanged(chunks: Sequence[Any]) -> Iterator[None]:
    """In a `with` block nothing of a model's chunks and of this process changes besides gradients.

    Random states; buffers, such as routers' counts of tokens; what FP8 with delayed scaling has learnt; and routers'
    and multi-token losses that Megatron sums up for its next log line.
    """
    tracker = get_cuda_rng_tracker()
    states, cpu, gpu = tracker.get_states(), torch.get_rng_state(), torch.cuda.get_rng_state()
    buffers = [(buffer, buffer.clone()) for chunk in chunks for _, buffer in chunk.named_buffers()]
    scales = {place: (state.scale.clone(), state.amax_history.clone()) for place, state in _delayed(chunks)}
    yield
    for buffer, before in buffers:
        buffer.copy_(before)
    if get_args().fp8:
        _restore_scales(chunks, scales)
    _forget_logged_losses()
    tracker.set_states(states)
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state(gpu)


_Place = tuple[int, str, str]
"""Where a state of delayed scaling is: the model's chunk, the module, the direction."""


@torch.no_grad()
def _restore_scales(chunks: Sequence[Any], scales: dict[_Place, tuple[Tensor, Tensor]]) -> None:
    """In place, because quantizers hold views. Those that were made since begin anew, as in a module's first pass;
    a history's rows may have become more or fewer (--fp8-amax-history-len at a resume)."""
    from wlb_megatron.attention.kernels.te_backend import delayed_scales

    for scale, history in delayed_scales():
        scale.fill_(1)
        history.zero_()
    for place, state in _delayed(chunks):
        if place in scales:
            scale, history = scales[place]
            rows = min(len(history), len(state.amax_history))
            state.scale.copy_(scale)
            state.amax_history[:rows].copy_(history[:rows])


def _delayed(chunks: Sequence[Any]) -> Iterator[tuple[_Place, Any]]:
    """Transformer Engine's states of delayed scaling (scale: fp32[n], amax_history: fp32[length, n]) by place.

    They are neither parameters nor buffers: a module has them in its fp8_meta from its first pass on, or since it was
    loaded from a checkpoint.
    """
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            meta = getattr(module, "fp8_meta", None) or {}
            for direction in ("scaling_fwd", "scaling_bwd"):
                state = meta.get(direction)
                if isinstance(getattr(state, "amax_history", None), Tensor):
                    yield (number, name, direction), state


def _forget_logged_losses() -> None:
    """Megatron adds up what layers record until it logs them."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    get_moe_metrics_tracker().clear()
    MTPLossLoggingHelper.tracker.clear()


MOST_CUT = 64
"""Segments with earlier keys that a rank is taken to have at most, where sharding cuts only what pays."""


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


def build_graphs(chunks: list[Any], sizes: GraphSizes) -> None:
    """Build what the layers can meet, for at most SECONDS (one graph more, to be exact), and tell.

    Ranks may stop after different graphs, for what is not built here is built later, by whoever needs it. But which
    calls go to the kernels for equal sequences is no matter of time, or a resumed run would not repeat bitwise: of
    these few all are built.
    """
    start = time.perf_counter()
    graphs, built = likeliest_first(chunks, sizes), 0
    for module, graph in graphs:
        if time.perf_counter() - start >= SECONDS and not isinstance(graph[2], Equal):
            break
        module.warm_up([graph])
        built += 1
    if graphs:
        took = time.perf_counter() - start
        remaining = "; others are built when a step needs them" if built < len(graphs) else ""
        print_rank_0(
            f"> wlb_megatron: {built} of {len(graphs)} attention kernels built in {took:.1f} s, {took / built:.2f} s "
            f"each{remaining}"
        )


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
