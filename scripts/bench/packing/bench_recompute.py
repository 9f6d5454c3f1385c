"""Prints how long it takes to plan what a step recomputes on one stage, and how much it keeps.

usage: python -m scripts.bench.packing.bench_recompute
"""

from __future__ import annotations

import random
import time
from statistics import median

from wlb_megatron.pipeline.kept_layers import Load, plan_kept_layers, stage_orders
from wlb_megatron.workload.memory import GIB
from wlb_megatron.workload.stage_memory import ModelChunk, StageMemory

LAYER = {"kept": 138_000, "input": 9_000, "forward": 140_000, "working": 300_000, "remade": 138_000}
"""Bytes of a layer of 4096 for a token held."""

STEPS = {
    # micro-batches, model chunks of a stage, sizes of groups
    "32 micro-batches": (32, 1, None),
    "32, of which one document has 11": (32, 1, [11] + [1] * 21),
    "32 through two model chunks": (32, 2, None),
}


def main() -> None:
    draw = random.Random(1)
    loads = [Load(tokens, tokens * draw.randint(50, 200)) for tokens in draw.sample(range(2000, 20000), 32)]
    print("step on the first of 4 stages, 16 layers, 60 GiB | ms | layers recomputed")
    for name, (count, chunks, groups) in STEPS.items():
        layers = 16 // chunks
        chunk = ModelChunk(layers=layers, recomputed=layers, floor=layers * LAYER["input"], **LAYER)
        memory = StageMemory(chunks=(chunk,) * chunks, ends=28, keys=12_000)
        order, times = stage_orders(4, count, chunks, groups)[0], []
        for _ in range(30):
            began = time.perf_counter()
            plan = plan_kept_layers(order, loads, memory, 60 * GIB)
            times.append(1e3 * (time.perf_counter() - began))
        share = sum(map(sum, plan.recomputed)) / (count * 16)
        print(f"{name} | {median(times):.2f} | {share:.1%}")


if __name__ == "__main__":
    main()
