"""Predicts from a sample whether fewer tokens will train than asked for. Printed at start and by analyze."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wlb_megatron.documents.blocks import Lengths, blocks
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.thresholds import Repeated, sampled
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker

LEAST = 0.95
"""Share of the windows asked for that an iteration should train in mean; with less a warning is given."""

SETTLE, COUNTED = 20, 20
"""Iterations until as many documents wait as ever will, and those that are counted."""


def nothing_predicted(lengths: Lengths, rules: Rules) -> str | None:
    """Why training refuses documents of these lengths (tokens), none of which has a second token; None where it does
    not."""
    if rules.predict(lengths):
        return None
    return (
        "nothing to train: no document has a second token, which the first would predict; correct the corpus"
    )


MOST_EPOCHS = 100
"""Passes over a corpus in one step, above which a command does not plan: a corpus of a few tokens takes it minutes."""


def too_small(lengths: Lengths, step_tokens: int) -> str | None:
    """Why a command does not plan steps of so many tokens over documents of these lengths; None where it does."""
    tokens = sum(int(np.asarray(block).sum()) for block in blocks(lengths))
    if step_tokens <= MOST_EPOCHS * tokens:
        return None
    return (
        f"a step of {step_tokens:,} tokens is {step_tokens // max(tokens, 1):,} times all documents ({tokens:,} "
        "tokens): give the lengths of a larger corpus, or a shorter --window"
    )


def too_many_documents(sample: Sequence[int], window: int, most: int, per_window: float) -> str | None:
    """A warning, where documents are so short that the cap on documents leaves micro-batches nearly empty.

    sample: lengths of documents (tokens). most: documents of a micro-batch. per_window: micro-batches for each window,
    at most. Documents of 2 tokens, windows of 100 and 10 documents a micro-batch: 20 % of the tokens asked for.
    """
    mean = float(np.mean(np.asarray(sample)))
    share = mean * most * per_window / window
    if share >= LEAST:
        return None
    return (
        f"WARNING: at most {share:.1%} of the tokens asked for train in a step: documents have {mean:.1f} tokens in "
        f"mean, and a micro-batch holds {most:,} of them; set --wlb-max-documents to {int(window / mean) + 1:,}, or "
        "shorten --seq-length"
    )


def unpaired(sample: Sequence[int], window: int, packer: VarlenPacker) -> str | None:
    """A warning, where documents above half of Lmax leave so much room that fewer tokens train than were asked for.

    sample: lengths of documents (tokens). packer: a new one of a few windows, which is used up. Nothing is tried where
    such documents hold few of the tokens.
    """
    lengths = sampled(sample)
    large = lengths[2 * lengths > packer.max_tokens]
    if large.sum() < (1 - LEAST) * lengths.sum():
        return None
    planner = Planner(Repeated(lengths), packer, global_tokens=packer.bins * window)
    trained = []
    for _ in range(SETTLE + COUNTED):
        planner.next_iteration()
        trained.append(planner.trained)
    share = (trained[-1] - trained[-1 - COUNTED]) / (COUNTED * planner.global_tokens)
    if share >= LEAST:
        return None
    return (
        f"WARNING: about {share:.0%} of the tokens asked for will train in a step: two documents above half of Lmax "
        f"({packer.max_tokens // 2:,} tokens) do not fit in one micro-batch; set --wlb-max-tokens to "
        f"{2 * int(np.quantile(large, 0.9)):,} if memory allows, or --wlb-micro-batches-per-window to 1.5"
    )
