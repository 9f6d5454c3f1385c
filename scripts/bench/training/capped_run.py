"""One rank of a training run whose memory torch caps: WLB_BENCH_GIB of the GPU. See gpu_memory_cap.py."""

from __future__ import annotations

import os

import torch

if __name__ == "__main__":
    device = int(os.environ["LOCAL_RANK"])
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(float(os.environ["WLB_BENCH_GIB"]) * (1 << 30) / total, device)
    from wlb_megatron.plugin import pretrain_gpt

    pretrain_gpt.main()
    stats = torch.cuda.memory_stats(device)
    print(
        f"rank {os.environ['RANK']}: reserved at most {torch.cuda.max_memory_reserved(device) / (1 << 30):.2f} GiB, "
        f"allocations tried again: {stats.get('num_alloc_retries', 0)}",
        flush=True,
    )
