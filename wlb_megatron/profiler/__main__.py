"""`torchrun --nproc-per-node N -m wlb_megatron.profiler`: the same as `wlb-megatron profile`, on several GPUs."""

from __future__ import annotations

import sys

from wlb_megatron.cli import main

sys.exit(main(["profile", *sys.argv[1:]]))
