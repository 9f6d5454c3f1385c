"""The WLB-LLM paper's tables by simulation: `wlb-megatron reproduce` from a checkout.

python -m scripts.bench.simulator.reproduce_paper --out reproduction [--lengths LENGTHS.npy]
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from wlb_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", *sys.argv[1:]]))
