#!/usr/bin/env bash
# Checks the patches against a clone of Megatron-LM: applied, applied again, reverted to the very files, on the branch of
# each version that they name (0.19.1: core_r0.19.0; main for a version without a branch).
# usage: scripts/check_patches.sh CLONE
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -ne 1 ] || ! git -C "$1" rev-parse --git-dir >/dev/null 2>&1; then
    sed -n 's/^# usage: /usage: /p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
clone=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
branch_of() { # the first of these names that the clone knows
    local name
    for name in "core_r$1.0" "origin/core_r$1.0" main origin/main; do
        if git -C "$clone" rev-parse --quiet --verify "$name^{commit}" >/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "check_patches.sh: $clone has neither core_r$1.0 nor main: fetch them" >&2
    return 1
}

patches=$(find "$root/patches" -name '*.patch' | wc -l)
for version in $(sed -n 's/^Tried on megatron-core //p' "$root/patches/0001-pretrain-gpt.patch" | tr -d ,); do
    series=${version%.*}
    branch=$(branch_of "$series")
    tree="$scratch/$series"
    mkdir "$tree"
    git -C "$clone" archive "$branch" pretrain_gpt.py megatron | tar -x -C "$tree"
    cp -r "$tree" "$tree.before"
    for action in --check --apply --apply --check; do
        "$root/patches/apply.sh" "$action" "$tree" >"$scratch/said"
    done
    [ "$(grep -c ' applied$' "$scratch/said")" -eq "$patches" ]
    "$root/patches/apply.sh" --revert "$tree" >/dev/null
    diff -r "$tree" "$tree.before"
    echo "$series: patches apply to and revert from $branch ($(git -C "$clone" rev-parse --short "$branch"))"
done
