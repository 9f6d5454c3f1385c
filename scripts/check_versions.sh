#!/usr/bin/env bash
# Trains three steps of a small GPT (CPU, CP=2) on each megatron-core that the plugin takes, by each way in, evaluates it
# on a validation and a test set, and compares the losses, which must be the same everywhere: PyPI's newest wheel by
# `-m wlb_megatron.pretrain_gpt` and `pretrain_hybrid`. With a clone of Megatron-LM also its branches by the launcher and
# patched, and 0.18.2's wheel, which has no model builder, by the launcher on its branch's scripts.
# Prints a table; fails if one way in differs. Without FLAGS it then compares losses and gradients of each
# with one process:
# routers' losses under context and tensor parallelism, multi-token prediction, and a virtual pipeline beside a busy
# process, several times, because what is sent too early or too late shows only in some runs. It compares the targets of
# --sft with each release's own, and looks for flags that docs/megatron_flags.md does not have. (A run takes 15 s on two
# cores. A row that times out on a machine with other work was starved: the wait for a send is the one that Megatron
# 0.18 has.)
# usage: scripts/check_versions.sh [CLONE [FLAGS ..]]     FLAGS: another layout of the two processes
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python="$root/.venv/bin/python"
clone=${1:-}
if { [ -n "$clone" ] && ! git -C "$clone" rev-parse --git-dir >/dev/null 2>&1; } ||
    [ ! -x "$python" ]; then
    sed -n 's/^# usage: /usage: /p' "${BASH_SOURCE[0]}" >&2
    echo "CLONE is a git clone of Megatron-LM; scripts/setup.sh makes .venv" >&2
    exit 2
fi
layout=("${@:2}")
compared=$((${#layout[@]} == 0))
[ ${#layout[@]} -gt 0 ] || layout=(--context-parallel-size 2)
wheel=0.19.2
wheel_without_builder=0.18.2
branches=(core_r0.19.0 core_r0.18.0 main dev pull-request/6742)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export XDG_CACHE_HOME="$scratch/cache" # checks of untried versions run here, and are forgotten
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1
export PYTHONPATH="$root/wlb_megatron/cpu:$root:$root/tests/stand_ins"

flags=$("$python" -c 'from scripts import megatron_job as job; print(job.MODEL, job.MACHINE, job.TRAINING)' | tr '\n' ' ')
"$python" -c 'import sys, pathlib; from scripts import megatron_job as job; job.build_python_corpus(pathlib.Path(sys.argv[1]))' \
    "$scratch/corpus" >/dev/null
# What older releases import without asking for it.
"$python" -m pip install --quiet --target "$scratch/needs" pyyaml six regex pydantic 2>"$scratch/pip.log" ||
    { cat "$scratch/pip.log"; exit 1; }

# The same layers as those of the flags, in a HybridModel.
hybrid=(--spec scripts.local_hybrid stack --hybrid-layer-pattern "*-*-*-*-")
reference=""
failed=0
train() { # train NAME MEGATRON ENTRY..: a row of the table
    local name=$1 megatron=$2 losses
    shift 2
    # shellcheck disable=SC2086  # the flags are words
    PYTHONPATH="$PYTHONPATH:$megatron:$scratch/needs" "$python" -m torch.distributed.run --nproc-per-node 2 \
        --master-addr 127.0.0.1 --master-port $((20000 + RANDOM % 20000)) "$@" $flags \
        "${layout[@]}" --seq-length 1024 --max-position-embeddings 2048 --global-batch-size 2 \
        --train-iters 3 --eval-iters 1 --split 98,1,1 --data-path "$scratch/corpus" --wlb-overlong drop \
        >"$scratch/log" 2>&1 || true
    losses=$(sed -nE 's/.*lm loss( value)?: ([0-9.E+-]+).*/\2/p' "$scratch/log" | tr '\n' ' ' || true)
    reference=${reference:-$losses}
    if [ -n "$losses" ] && [ "$losses" = "$reference" ]; then
        printf '%-44s works    %s\n' "$name" "$losses"
    else
        printf '%-44s FAILED   %s\n' "$name" "${losses:-$(grep -E 'Error|^wlb_megatron|needs' "$scratch/log" | head -1)}"
        failed=1
    fi
}

passes() { # passes NAME MEGATRON WHAT PYTEST..: whether these tests pass with it
    [ "$compared" = 1 ] || return 0
    local name=$1 megatron=$2 what=$3
    shift 3
    if (cd "$root/tests" && PYTHONPATH="$PYTHONPATH:$megatron:$scratch/needs" "$python" -m pytest -q "$@") >"$scratch/log" 2>&1; then
        echo "$name $what"
    else
        grep -E '^E ' "$scratch/log" | head -2
        failed=1
    fi
}

own() { # own NAME MEGATRON: its parser's flags, and what it trains of conversations
    passes "$1" "$2" "docs/megatron_flags.md has every flag" test_megatron_flags.py
    passes "$1" "$2" "--sft has the targets of its tokenizer and SFTDataset" \
        test_sft_data.py test_sft_training.py -k "tokens_and_targets or targets_are_those"
}

compare() { # compare NAME MEGATRON [SCRIPTS]: rows of tests/megatron_combinations.py against one process
    [ "$compared" = 1 ] || return 0
    local rows=(--device cpu --iterations 2 --timeout 600 --out "$scratch/rows" --only)
    [ $# -lt 3 ] || export WORKER_SCRIPTS=$3
    echo "$1 against one process"
    PYTHONPATH="$PYTHONPATH:$2:$scratch/needs" "$python" "$root/scripts/check_combinations.py" "${rows[@]}" \
        "MoE, CP2" "MoE with z-loss" "MoE, global aux loss, CP2" EP2xTP2 "MTP of 2, CP2xPP2" 2>"$scratch/log" | sed 1d ||
        failed=1
    PYTHONPATH="$PYTHONPATH:$2:$scratch/needs" "$python" "$root/scripts/check_combinations.py" --load 1 --repeat 4 \
        "${rows[@]}" "VPP2 on PP2, CP2" 2>"$scratch/log" | sed 1d || failed=1
    unset WORKER_SCRIPTS
}

download() { # download VERSION: PyPI's wheel, into a folder of its name
    "$python" -m pip install --quiet --no-deps --target "$scratch/$1" "megatron-core==$1" 2>"$scratch/pip.log" ||
        { cat "$scratch/pip.log"; exit 1; }
}

download "$wheel"
train "$wheel -m wlb_megatron.pretrain_gpt" "$scratch/$wheel" -m wlb_megatron.pretrain_gpt
train "$wheel -m wlb_megatron.pretrain_hybrid" "$scratch/$wheel" -m wlb_megatron.pretrain_hybrid "${hybrid[@]}"
own "$wheel" "$scratch/$wheel"
compare "$wheel" "$scratch/$wheel"
[ -n "$clone" ] || exit "$failed"
for branch in "${branches[@]}"; do
    tree="$scratch/$branch"
    mkdir -p "$tree"
    name=$(git -C "$clone" rev-parse --quiet --verify "$branch" >/dev/null && echo "$branch" || echo "origin/$branch")
    if ! git -C "$clone" rev-parse --quiet --verify "$name" >/dev/null; then
        echo "$branch is not in this clone: left out"
        continue
    fi
    git -C "$clone" archive "$name" megatron pretrain_gpt.py gpt_builders.py model_provider.py \
        pretrain_hybrid.py hybrid_builders.py | tar -x -C "$tree"
    cp "$scratch/$wheel"/megatron/core/datasets/helpers_cpp*.so "$tree/megatron/core/datasets/" # else make builds them
    commit=$(git -C "$clone" rev-parse --short "$name")
    train "$branch $commit launcher" "" -m wlb_megatron.launch "$tree/pretrain_gpt.py"
    case $branch in # those that docs/support.md names for it
    core_r0.19.0 | core_r0.18.0 | main)
        train "$branch $commit launcher, hybrid" "" -m wlb_megatron.launch "$tree/pretrain_hybrid.py" "${hybrid[@]}"
        ;;
    esac
    own "$branch" "$tree"
    if [ "$branch" = core_r0.18.0 ]; then
        compare "$branch" "$tree" "$tree"
        mkdir "$scratch/alone"
        cp "$tree"/*.py "$scratch/alone"
        download "$wheel_without_builder"
        train "$wheel_without_builder launcher" "$scratch/$wheel_without_builder" \
            -m wlb_megatron.launch "$scratch/alone/pretrain_gpt.py"
        train "$wheel_without_builder launcher, hybrid" "$scratch/$wheel_without_builder" \
            -m wlb_megatron.launch "$scratch/alone/pretrain_hybrid.py" "${hybrid[@]}"
        own "$wheel_without_builder" "$scratch/$wheel_without_builder"
        compare "$wheel_without_builder" "$scratch/$wheel_without_builder" "$scratch/alone"
    else
        compare "$branch" "$tree"
    fi
    "$root/patches/apply.sh" --apply "$tree" >/dev/null
    train "$branch $commit patched" "" "$tree/pretrain_gpt.py"
done
exit "$failed"
