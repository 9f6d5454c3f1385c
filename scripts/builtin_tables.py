#!/usr/bin/env python3
"""Write wlb_megatron/workload/tables/NAME.json, the built-in kernel tables, from profiles of GPUs.

python scripts/builtin_tables.py --links TWO_GPUS.json h100=H100.json [h200=H200.json]

Each profile: of 8 query and 2 key-value heads of 128 on a rank (7B at TP=4), the full grid:
wlb-megatron profile --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 8
    --kv-channels 128 --swiglu --tp 4 --grid full --out H100.json
--links: a profile of two GPUs or more, whose all-to-all is taken for the exchange.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wlb_megatron.workload.kernel_table import TABLES, VERSION, KernelTable
from wlb_megatron.workload.profile import Profile, read_profile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profiles", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--links", type=Path)
    args = parser.parse_args()
    links = None if args.links is None else read_profile(args.links)
    for argument in args.profiles:
        name, _, path = argument.partition("=")
        profile = read_profile(path)
        table = {"version": VERSION, "measured": profile.describe(), **asdict(_table(profile, links))}
        lines = (f" {json.dumps(key)}: {_text(value, key)}" for key, value in table.items())
        out = TABLES / f"{name}.json"
        out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(f"written: {out}")


def _table(profile: Profile, links: Profile | None) -> KernelTable:
    table = profile.costs.table
    if (table.heads, table.kv_heads, table.head_dim) != (8, 2, 128):
        raise SystemExit(
            f"{profile.path} is of {table.heads} / {table.kv_heads} heads, not 8 / 2: profile 7B at TP=4"
        )
    if links is not None and links.costs.links:
        link = links.costs.links["all_to_all"]
        # There and back; a row is K and V, or their gradients, of 2 bytes.
        row = 2 * 2 * table.kv_heads * table.head_dim
        table = replace(table, exchange=2 * link.latency, exchange_row=2 * row * link.per_byte)
    return table


def _text(value: Any, key: str) -> str:
    """JSON on one line, a grid's rows on one each; times to four figures, the places of a grid exact."""
    if isinstance(value, tuple) and isinstance(value[0], tuple):
        return "[\n" + ",\n".join(f"  {_text(row, key)}" for row in value) + "\n ]"
    if isinstance(value, tuple):
        return f"[{', '.join(_text(item, key) for item in value)}]"
    exact = not isinstance(value, float) or key in ("queries", "ratios")
    return json.dumps(value if exact else float(f"{value:.4g}"))


if __name__ == "__main__":
    main()
