#!/usr/bin/env bash
# What no row of docs/results shows yet, in one call on one or two GPUs: configurations against one GPU, a restart by
# torchrun over NCCL bit for bit, and the allocator over 200 steps of mixed lengths.
#   bash scripts/bench/training/gpu_rows.sh GPUS OUT [SECONDS for the first two (180)]
# One GPU: rows "one GPU, ..."; two: all others (those in no file of docs/results first). Exits 1 where a part failed.
set -uo pipefail
gpus=$1 out=$2 seconds=${3:-180}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
cd "$root" && export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
if [ "$gpus" = 1 ]; then chosen=("one GPU"); else chosen=(TP CP PP DP); fi
timeout "$seconds" python3 scripts/kill_resume.py 1 --torchrun --gpu --processes "$gpus" > "$out/restart.txt" 2>&1 &
restart=$!
python3 scripts/check_combinations.py --device gpu --only "${chosen[@]}" --jobs 6 --budget "$seconds" \
    --out "$out/combinations" | tee "$out/combinations.txt"
combinations=${PIPESTATUS[0]}
wait "$restart"
restarted=$?
tail -3 "$out/restart.txt"
python3 -m scripts.bench.training.gpu_allocator --out "$out/allocator" | tee "$out/allocator.txt"
allocator=${PIPESTATUS[0]}
echo "combinations $combinations, restart $restarted, allocator $allocator"
exit $((combinations | restarted | allocator))
