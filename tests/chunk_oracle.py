"""What the tests of documents in chunks share: random iterations, cut into micro-batches, and their shard plans."""

import numpy as np
from hypothesis import strategies as st

from wlb_megatron.plan import PADDING, Piece
from wlb_megatron.plugin.planning import cut, pad
from wlb_megatron.sharding.chunks import links_of
from wlb_megatron.sharding.segments import validate
from wlb_megatron.workload.kernel_table import h100


@st.composite
def iterations(draw, most=60, documents=5, micro_batches=5):
    """Pieces of each micro-batch: documents in 1 to 5 chunks, in any micro-batches as long as they are in order."""
    count = draw(st.integers(2, micro_batches))
    found = [[] for _ in range(count)]
    for document in range(draw(st.integers(1, documents))):
        chunks = draw(st.integers(1, min(5, count)))
        where = sorted(draw(st.permutations(range(count)))[:chunks])
        begin = start = draw(st.sampled_from([0, 0, 7]))  # a document split before it came in chunks
        for index in where:
            size = draw(st.one_of(st.integers(1, 4), st.integers(1, most)))
            found[index].append(Piece(0, document, start, start + size, start - begin))
            start += size
    found = [draw(st.permutations(pieces)) for pieces in found]
    return [pieces or [Piece(0, 100 + index, 0, 3)] for index, pieces in enumerate(found)]


def shard_plans(micro_batches, cp, kind, table=None):
    """Padded pieces and valid shard plans of an iteration."""
    padded = [pad(tuple(pieces), cp) for pieces in micro_batches]
    lengths = [np.array([piece.tokens for piece in pieces], dtype=np.int64) for pieces in padded]
    plans = cut(lengths, cp, kind, table or h100(), links_of(padded))
    for plan in plans:
        validate(plan)
    return padded, plans


def tokens_of(pieces, rows):
    """(document, token) of each key of rows (piece, start, end, ..), in order; padding has its micro-batch's own."""
    return [
        (pieces[at].document, pieces[at].start - pieces[at].prefix + token)
        for at, start, end, *_ in np.asarray(rows).tolist()
        for token in range(start, end)
    ]


def is_real(token):
    return token[0] != PADDING
