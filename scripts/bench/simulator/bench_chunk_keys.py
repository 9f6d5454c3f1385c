"""Where to keep the keys of a document in chunks: on the rank that made them, or gathered once on all ranks.

    python3 -m scripts.bench.simulator.bench_chunk_keys --out DIR

Predicted for one layer, forward and backward: memory a rank needs for the document's keys and their gradients, time
that transfers would take if nothing hid them, beside the attention kernels' time by the H100's table (8 query heads, 2
KV heads of 128: a quarter of 32 / 8, whose ratios are the same). Writes DIR/chunk_keys.csv and prints a table.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

from wlb_megatron.plan import Piece
from wlb_megatron.report.files import write_csv
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.chunks import links_of
from wlb_megatron.sharding.predict import predict
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard_all
from wlb_megatron.workload.kernel_table import KernelTable, h100

TOKENS = 131072
QUADRATIC_AT = 24576
ROW = 2 * 2 * 128 * 2
"""Bytes of a token's keys and values in bf16; their gradients are summed in fp32, twice as many."""
LINKS = {"NVLink": 370.0, "network": 45.0}
"""Bytes a nanosecond each way, of a GPU."""


def chunks_of(count: int, cp: int) -> list[tuple[Piece]]:
    """TOKENS in chunks of like work, (e - s) + (e * e - s * s) / QUADRATIC_AT."""
    whole, half = TOKENS + TOKENS**2 / QUADRATIC_AT, QUADRATIC_AT / 2
    ends = [(half * half + QUADRATIC_AT * whole * at / count) ** 0.5 - half for at in range(count + 1)]
    bounds = [round(end / (256 * cp)) * 256 * cp for end in ends]
    return [(Piece(0, 0, start, end, start),) for start, end in pairwise(bounds)]


def fetched(plan: ShardPlan) -> int:
    """Rows that the neediest rank fetches from others."""
    plans = (attention_layout(plan, rank).exchange for rank in range(plan.cp_size))
    return max(sum(rows.recv_counts) for rows in plans)


def kernels_ms(plans: list[ShardPlan], table: KernelTable) -> float:
    """Of all chunks, the slowest rank's kernels; a table without an exchange leaves them alone."""
    return sum(int(predict(plan, table).max()) for plan in plans) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    table = h100()
    alone = KernelTable(**vars(table) | {"exchange": 0.0, "exchange_row": 0.0})
    rows = []
    print(
        f"{'cp':>3}{'chunks':>7}{'kernels ms':>11}  {'keys':9}{'MiB a layer':>12}{'NVLink ms':>11}{'network ms':>11}"
    )
    for cp in (2, 4, 8, 16):
        for count in (1, 2, 4, 8):
            pieces = chunks_of(count, cp)
            lengths = [[piece.tokens] for (piece,) in pieces]
            plans = shard_all(lengths, cp, "per-document", links=links_of(pieces))
            kernels = kernels_ms(plans, alone)
            kept = TOKENS - lengths[-1][0]  # the last chunk's keys are for itself alone
            # A whole document's keys travel there, their gradients back. Keys that stay travel again in backward, too.
            # Keys that are gathered travel once, and so do their gradients, summed in fp32.
            stay = (2 if count == 1 else 3) * sum(map(fetched, plans))
            ways = [("stay", stay, kept // cp), ("gathered", 3 * TOKENS * (cp - 1) // cp, kept)]
            for where, moved, held in ways[:count]:
                ms = {link: moved * ROW / rate / 1e6 for link, rate in LINKS.items()}
                mib = held * ROW * (1 + 2) / 2**20
                cells = f"{cp:3}{count:7}{kernels:11.1f}  {where:9}{mib:12.0f}"
                print(f"{cells}{ms['NVLink']:11.2f}{ms['network']:11.2f}")
                row = {"tokens": TOKENS, "cp": cp, "chunks": count, "kernels_ms": kernels, "keys": where}
                row |= {"mib_a_layer": mib} | {f"{link.lower()}_ms": value for link, value in ms.items()}
                rows.append(row)
    write_csv(args.out / "chunk_keys.csv", rows)


if __name__ == "__main__":
    main()
