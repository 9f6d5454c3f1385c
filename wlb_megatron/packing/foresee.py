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
"""Warn if an iteration would train less than this share of the windows asked for, in mean."""

SETTLE, COUNTED = 20, 20
"""Iterations until as many documents wait as ever will, and those that are counted."""


def nothing_predicted(lengths: Lengths, rules: Rules) -> str | None:
    """Why training refuses documents of these lengths (tokens): none has a second token. None if one has."""
    if rules.predict(lengths):
        return None
    return (
        "nothing to train: no document has a second token, which the first would predict; correct the corpus"
    )


MOST_EPOCHS = 100
"""Commands refuse to plan a step of more passes over the corpus than this: a corpus of a few tokens would take
minutes."""


def too_small(lengths: Lengths, step_tokens: int) -> str | None:
    """Why a command refuses steps of this many tokens over documents of these lengths; None if it accepts them."""
    tokens = sum(int(np.asarray(block).sum()) for block in blocks(lengths))
    if step_tokens <= MOST_EPOCHS * tokens:
        return None
    return (
        f"a step of {step_tokens:,} tokens is {step_tokens // max(tokens, 1):,} times all documents ({tokens:,} "
        "tokens): give the lengths of a larger corpus, or a shorter --window"
    )


def too_many_documents(
    sample: Sequence[int], window: int, max_documents: int, per_window: float
) -> str | None:
    """A warning if documents are so short that the limit on documents leaves micro-batches nearly empty, else None.

    sample: lengths of documents (tokens). max_documents: documents per micro-batch. per_window: the most micro-batches
    per window. Example: documents of 2 tokens, windows of 100 and 10 documents per micro-batch: 20 % of the tokens
    asked for.
    """
    mean = float(np.mean(np.asarray(sample)))
    share = mean * max_documents * per_window / window
    if share >= LEAST:
        return None
    enough = int(window / mean) + 1
    return (
        f"WARNING: at most {share:.1%} of the tokens asked for train in a step: documents have {mean:.1f} tokens in "
        f"mean, and a micro-batch holds {max_documents:,} of them; set --wlb-max-documents to {enough:,}, or shorten "
        "--seq-length"
    )


def unpaired(sample: Sequence[int], window: int, packer: VarlenPacker) -> str | None:
    """A warning if documents longer than half of Lmax waste so much space that fewer tokens train than asked for,
    else None.

    sample: lengths of documents (tokens). packer: a new one of a few windows, which is used up. It is not run if such
    documents hold few of the tokens.
    """
    lengths = sampled(sample)
    large = lengths[2 * lengths > packer.max_tokens]
    if large.sum() < (1 - LEAST) * lengths.sum():
        return None
    planner = Planner(Repeated(lengths), packer, global_tokens=packer.bins * window)
    trained_tokens = []
    for _ in range(SETTLE + COUNTED):
        planner.next_iteration()
        trained_tokens.append(planner.trained)
    share = (trained_tokens[-1] - trained_tokens[-1 - COUNTED]) / (COUNTED * planner.global_tokens)
    if share >= LEAST:
        return None
    return (
        f"WARNING: about {share:.0%} of the tokens asked for will train in a step: two documents above half of Lmax "
        f"({packer.max_tokens // 2:,} tokens) do not fit in one micro-batch; set --wlb-max-tokens to "
        f"{2 * int(np.quantile(large, 0.9)):,} if memory allows, or --wlb-micro-batches-per-window to 1.5"
    )
