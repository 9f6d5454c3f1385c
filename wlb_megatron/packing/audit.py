"""Checks each plan before it trains: no packer may lose a token, train one twice, or exceed Lmax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter

from wlb_megatron.errors import WlbError
from wlb_megatron.packing.packer import Grid, Packer
from wlb_megatron.plan import Piece

_CURE = "this is a fault of the packer, please report it; to train on, choose another --wlb-packing"


def audit(
    packer: Packer, iteration: int, before: Sequence[Piece], grid: Grid, waiting_now: Sequence[Piece]
) -> int:
    """Tokens that train in this iteration. WlbError if they and those that wait are not exactly those of `before`.

    before: pieces that waited, then those that arrived. waiting_now: those that wait now. A packer may cut pieces.
    Those that it did not cut cancel out as equal tuples, which takes less than 0.1 us each.
    """
    micro_batches = [micro_batch for row in grid for micro_batch in row]
    tokens = [micro_batch.tokens for micro_batch in micro_batches]
    after = [*chain.from_iterable(micro_batch.pieces for micro_batch in micro_batches), *waiting_now]
    if problem := _difference(before, after):
        count, wait = _tokens(before), _tokens(waiting_now)
        raise WlbError(
            f"{type(packer).__name__} was given {count:,} tokens in iteration {iteration}, trains {sum(tokens):,} and "
            f"lets {wait:,} wait, but {problem}: {_CURE}"
        )
    if max(tokens) > packer.max_tokens:
        raise WlbError(
            f"{type(packer).__name__} made a micro-batch of {max(tokens):,} tokens in iteration {iteration}, above its "
            f"limit of {packer.max_tokens:,}: {_CURE}"
        )
    return sum(tokens)


def _difference(before: Sequence[Piece], after: Sequence[Piece]) -> str:
    """Says of which document's tokens there are fewer or more after than before; empty if there are none.

    Each piece counts +1 at its start and -1 at its end. Where a piece was cut these cancel: [0, 3) and [3, 8) count as
    [0, 8) does.
    """
    before_set, after_set = set(before), set(after)
    if (len(before_set), len(after_set)) == (
        len(before),
        len(after),
    ):  # no piece comes twice: only cut ones can differ
        before, after = list(before_set - after_set), list(after_set - before_set)
        if not before and not after:
            return ""
    starts, ends = itemgetter(0, 1, 2), itemgetter(0, 1, 3)
    expected = Counter(chain(map(starts, before), map(ends, after)))
    counts = Counter(chain(map(starts, after), map(ends, before)))
    if expected == counts:
        return ""
    epoch, document, start = place = min(x for x in {*expected, *counts} if expected[x] != counts[x])
    what = "is left out" if expected[place] > counts[place] else "comes more often than it was given"
    return f"document {document} of epoch {epoch} {what} from token {start} on"


def _tokens(pieces: Iterable[Piece]) -> int:
    return sum(piece.tokens for piece in pieces)
