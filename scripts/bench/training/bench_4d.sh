#!/usr/bin/env bash
# Step times of whole training over N GPUs of this host: Megatron as it is, plain, fixed-length greedy, WLB-LLM as its
# paper has it, and this project's settings, in every layout, each with the simulator's prediction beside it.
#   scripts/bench/training/bench_4d.sh N --script ../Megatron-LM/pretrain_gpt.py [--layouts 1,2,4,1] [--schemes plain,ours] [--out DIR]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec python3 -m scripts.bench.training.bench_4d "$@"
