"""One bottom-right causal call beside a diagonal and a rectangle, by shape of segment, with both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from scripts.bench.attention.attention_bench import DIM, HEADS, KV_HEADS, machine
from wlb_megatron.attention.kernels.kernel_choice import kernels
from wlb_megatron.profiler.attention import AttentionBench
from wlb_megatron.profiler.clock import Clock
from wlb_megatron.profiler.points import Point
from wlb_megatron.report.files import write_csv
from wlb_megatron.workload.profile import ProfiledModel

K = 1024
SHAPES = (
    *((32 * K, keys * K) for keys in (32, 48, 64, 128)),
    *((16 * K, keys * K) for keys in (16, 24, 64)),
    *((8 * K, keys * K) for keys in (8, 12, 16, 32, 128)),
    *((2 * K, keys * K) for keys in (2, 3, 4, 8, 32)),
    *((512, keys) for keys in (512, 1024, 4 * K, 16 * K)),
    *((128, keys) for keys in (256, 2 * K, 16 * K)),
)
"""Queries and keys of a segment, of which a call has as many as 32K queries make."""


def shapes(out: Path) -> None:
    """Milliseconds of one bottom-right call and of a diagonal and a rectangle, by shape of segment."""
    model = ProfiledModel(
        hidden=HEADS * DIM, ffn=4 * HEADS * DIM, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, vocab=256
    )
    device, rows = torch.device("cuda"), []
    print(
        f"{'queries':>8}{'keys':>8}{'x':>5}  bottom-right, diagonal + rectangle (ms), TFLOP/s of the one call"
    )
    benches = {
        name: AttentionBench(model, kernels(name), device, torch.bfloat16) for name in ("cudnn", "fa4")
    }
    for queries, keys in SHAPES:
        copies = max(1, min(32 * K // queries, 512 * K // keys))
        line = f"{queries:8}{keys:8}{copies:5}"
        for name, bench in benches.items():
            earlier = keys - queries
            shapes: dict[str, dict[str, Any]] = {
                "one": {"bottom_right": [[queries, keys, copies]]},
                "diagonal": {"diagonals": [[queries, copies]]},
            }
            if earlier:
                shapes["rectangle"] = {"rectangles": [[queries, earlier, copies]]}
            took = {}
            for what, sizes in shapes.items():
                point = Point("call", {"diagonals": [], "rectangles": []} | sizes)
                took[what] = Clock(device, 0.04).measure(*bench.step(point))
            row: dict[str, Any] = {"queries": queries, "keys": keys, "copies": copies}
            for what, timing in took.items():
                row |= {
                    f"{what}_forward_ms": timing.forward[0] / 1e6,
                    f"{what}_backward_ms": timing.backward[0] / 1e6,
                }
            one_call, *two_calls = [(t.forward[0] + t.backward[0]) / 1e6 for t in took.values()]
            pairs = copies * queries * (keys - queries / 2)
            rate = 3.5 * 4 * pairs * HEADS * DIM / one_call / 1e9
            line += f"   {name}: {one_call:8.3f}, {sum(two_calls):8.3f}, {rate:4.0f}"
            rows.append(
                row
                | {"one_ms": one_call, "two_ms": sum(two_calls), "one_tflops": rate}
                | machine()
                | {"kernels": name}
            )
        print(line, flush=True)
        # A backend's rows differ in what they have: where there is no rectangle, its columns are empty.
        columns = {column: "" for row in rows for column in row}
        write_csv(out / "calls.csv", [columns | row for row in rows])
