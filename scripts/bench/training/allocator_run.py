"""One training run of gpu_allocator.py: wlb_megatron.pretrain_gpt, and what torch's allocator says of it.

python -m scripts.bench.training.allocator_run OUT.json <Megatron's flags>
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from wlb_megatron.plugin import pretrain_gpt
from wlb_megatron.plugin.step import forward_step as step
from wlb_megatron.whole_files import renamed_at_end


def main() -> None:
    out = Path(sys.argv[1])
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    usual, reserved = step.forward_step, dict[int, int]()

    def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        made = usual(*args, **kwargs)
        reserved[len(reserved) + 1] = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        return made

    step.forward_step = forward_step
    try:
        pretrain_gpt.main()
    finally:
        step.forward_step = usual
    statistics = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    figures = {
        "allocated_peak": statistics.get("allocated_bytes.all.peak", 0),
        "reserved_peak": statistics.get("reserved_bytes.all.peak", 0),
        "retries": statistics.get("num_alloc_retries", 0),
        "reserved": list(reserved.values()),
    }
    with renamed_at_end(out) as scratch:
        scratch.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
