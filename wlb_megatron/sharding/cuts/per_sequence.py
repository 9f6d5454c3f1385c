"""Per-sequence sharding: cuts the packed sequence into 2 * CP equal slots (as Llama 3 does, with a document mask).

It balances one long document. With many documents, the rank whose slots hold the ends of the long ones works longest.
"""

from __future__ import annotations

import numpy as np

from wlb_megatron.sharding.alignment import slot_bounds
from wlb_megatron.sharding.cuts.slots import PieceList, deal
from wlb_megatron.sharding.segments import IntArray, ShardPlan
from wlb_megatron.workload.kernel_table import KernelTable


def per_sequence(pieces: PieceList, cp_size: int, table: KernelTable | None = None) -> list[ShardPlan]:
    """The plan of each micro-batch; the table does not matter.

    Example: lengths [24, 8], CP=4: slots of 4 tokens; piece 1 is slots 6 and 7, held by ranks 1 and 0. Raises
    ValueError if a total is not a positive multiple of cp_size.
    """
    return deal(pieces, sequence_cuts(pieces, cp_size))


def sequence_cuts(pieces: PieceList, cp_size: int) -> IntArray:
    """int64[n, 2 * CP + 1]: the bounds of the slots, as tokens inside each piece."""
    bounds = slot_bounds(pieces.totals(), cp_size)[pieces.owner]
    starts = pieces.before(pieces.lengths)
    return np.clip(bounds - starts[:, None], 0, pieces.lengths[:, None])
