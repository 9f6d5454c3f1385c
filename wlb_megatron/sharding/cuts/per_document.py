"""Per-document sharding without padding (WLB-LLM section 5): cuts each piece into 2 * CP chunks, one per slot.

Rank i holds chunks i and 2CP-1-i of every piece, so its work is 1/CP of the piece's. The d mod 2CP tokens that do not
divide lengthen chunks by one token each. A cursor over the slots places them and continues from piece to piece of a
micro-batch. So all slots end with the same number of tokens, and no piece is padded.
"""

from __future__ import annotations

import numpy as np

from wlb_megatron.sharding.alignment import slot_bounds
from wlb_megatron.sharding.cuts.slots import PieceList, deal
from wlb_megatron.sharding.segments import IntArray, ShardPlan
from wlb_megatron.workload.kernel_table import KernelTable


def per_document(pieces: PieceList, cp_size: int, table: KernelTable | None = None) -> list[ShardPlan]:
    """The plan of each micro-batch; the table does not matter.

    Example: lengths [5, 3], CP=2: piece 0 lengthens slot 0 (chunks 2 1 1 1), piece 1 slots 1, 2, 3 (chunks 0 1 1 1).
    Raises ValueError if a total is not a positive multiple of cp_size.
    """
    return deal(pieces, document_cuts(pieces, cp_size))


def document_cuts(pieces: PieceList, cp_size: int) -> IntArray:
    """int64[n, 2 * CP + 1]: where each piece's chunks begin and end, in tokens."""
    slot_bounds(pieces.totals(), cp_size)  # refuses totals that would leave ranks unequal
    slots = 2 * cp_size
    base, extra = np.divmod(pieces.lengths, slots)
    cursor = (pieces.before(extra) % slots)[:, None]
    base, extra = base[:, None], extra[:, None]
    chunk = np.arange(slots + 1)
    # Longer chunks are slots cursor .. cursor + extra - 1, modulo 2CP: how many of them lie before slot c?
    # With 8 slots, cursor 6, extra 3 (slots 6, 7, 0): before slot 1 one (slot 0, wrapped), before slot 7 two.
    ahead = np.clip(chunk - cursor, 0, extra)
    wrapped = np.clip(cursor + extra - slots, 0, chunk)
    return chunk * base + ahead + wrapped
