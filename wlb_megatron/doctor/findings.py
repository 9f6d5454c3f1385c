"""What a check of `wlb-megatron doctor` yields, and the two questions that most checks ask."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from wlb_megatron.errors import installed_version as version

OK, NOTE, FIX = "ok", "note", "FIX"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: `found` of `what`, the verdict, and what to do if that is not OK."""

    what: str
    found: str
    verdict: str = OK
    cure: str = ""


def gpus() -> int:
    """Number of GPUs that torch sees; 0 without torch, or if wlb_megatron/cpu answers for CUDA."""
    if version("torch") is None:
        return 0
    import torch

    if "cpu_cuda" in sys.modules:  # of wlb_megatron/cpu, imported with torch: the CPU answers for CUDA
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
