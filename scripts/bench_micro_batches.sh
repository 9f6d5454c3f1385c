#!/usr/bin/env bash
# How many micro-batches a step is made of, measured: a pipeline over 4 GPUs, then two over 2 GPUs each, side by side.
#   scripts/bench_micro_batches.sh PRETRAIN_GPT LENGTHS OUT [PROFILE]
# LENGTHS: .npy of document lengths for a window of 64K. PROFILE: of this GPU, for predictions and the choice of numbers.
set -euo pipefail
script=$1 lengths=$2 out=$3 profile=${4:-}
here=$(dirname "${BASH_SOURCE[0]}")
mkdir -p "$out"
common=(--script "$script" --lengths "$lengths" --seq-length 65536 --warm-ranks)
if [ -n "$profile" ]; then
    common+=(--profile "$profile")
fi
bench() { python3 "$here/bench_4d.py" "$@" "${common[@]}"; }

bench 4 --layouts 1,1,4,1 --schemes plain,one,two,four,ours --layers 16 --iterations 16 --warm-up 5 --out "$out/pp4"
for windows in 2 4; do
    gpus=$((windows - 2)),$((windows - 1))
    CUDA_VISIBLE_DEVICES=$gpus bench 2 --layouts 1,1,2,1 --global-batch-size $windows --layers 8 --iterations 18 --warm-up 6 \
        --schemes plain,one,two,ours --out "$out/pp2-$windows" >"$out/pp2-$windows.txt" 2>&1 &
done
wait
tail -n 6 "$out"/pp2-*.txt
