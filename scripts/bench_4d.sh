#!/usr/bin/env bash
# Step times of whole training over N GPUs of this host: Megatron as it is, plain, fixed-length greedy, WLB-LLM as its
# paper has it, and this project's settings, in every layout, each with the simulator's prediction beside it.
#   scripts/bench_4d.sh N --script ../Megatron-LM/pretrain_gpt.py [--layouts 1,2,4,1] [--schemes plain,ours] [--out DIR]
set -euo pipefail
exec python3 "$(dirname "$0")/bench_4d.py" "$@"
