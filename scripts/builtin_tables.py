#!/usr/bin/env python3
"""Write wlb_megatron/workload/builtin_tables.py from profiles of GPUs.

python scripts/builtin_tables.py --links TWO_GPUS.json h100=H100.json [h200=H200.json]

Each profile: of 8 query and 2 key-value heads of 128 on a rank (7B at TP=4), the full grid:
wlb-megatron profile --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 8
    --kv-channels 128 --swiglu --tp 4 --grid full --out H100.json
--links: a profile of two GPUs or more, whose all-to-all is taken for the exchange.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import indent, wrap
from typing import Any

from wlb_megatron.workload.kernel_table import KernelTable
from wlb_megatron.workload.profile import Profile, read_profile

OUT = Path(__file__).resolve().parents[1] / "wlb_megatron" / "workload" / "builtin_tables.py"
HEAD = '''"""Kernel tables of GPUs as the profiler measured them. Made by scripts/builtin_tables.py: do not edit.

Forward + backward nanoseconds of one layer's attention, bf16, 8 query and 2 key-value heads of 128 channels.
"""

from __future__ import annotations

from typing import Any

# fmt: off
TABLES: dict[str, dict[str, Any]] = {
'''


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profiles", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--links", type=Path)
    args = parser.parse_args()
    links = None if args.links is None else read_profile(args.links)
    parts = [HEAD]
    for given in args.profiles:
        name, _, path = given.partition("=")
        profile = read_profile(path)
        parts += [f"    # {line}\n" for line in wrap(profile.told(), 110)] + [f"    {name!r}: {{\n"]
        for key, value in asdict(_table(profile, links)).items():
            exact = key in ("queries", "ratios")
            parts.append(f"        {key!r}: {_text(value, exact)},\n")
        parts.append("    },\n")
    OUT.write_text("".join([*parts, "}\n# fmt: on\n"]), encoding="utf-8")
    print(f"written: {OUT}")


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


def _text(value: Any, exact: bool = False) -> str:
    """A literal; numbers to four figures unless exact, lines of at most 110 characters, a grid's rows begin lines."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "(\n" + "".join(indent(f"{_text(row)},\n", " " * 12) for row in value) + "        )"
    if isinstance(value, tuple):
        told = f"({', '.join(_text(one, exact) for one in value)},)"
        return "\n".join(wrap(told, 96, subsequent_indent=" "))
    return repr(float(f"{value:.4g}")) if isinstance(value, float) and not exact else repr(value)


if __name__ == "__main__":
    main()
