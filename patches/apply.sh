#!/usr/bin/env bash
# Adds the plugin's calls to a fork of Megatron-LM, takes them out again, or tells what is there: all patches or none.
# usage: patches/apply.sh --check|--apply|--revert PATH    PATH: the checkout
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
action=${1:-} checkout=${2:-} check=() reverse=()
case $#$action in
2--check) check=(--check) outcome="can be applied" ;;
2--apply) outcome="applied" ;;
2--revert) reverse=(--reverse) outcome="reverted" ;;
*) sed -n 's/^# usage: /usage: /p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
if [ ! -f "$checkout/megatron/training/__init__.py" ]; then
    echo "apply.sh: $checkout is no Megatron-LM checkout; give its root folder" >&2
    exit 2
fi
# A repository around the checkout is not looked at: git would skip files outside of what it tracks there.
GIT_CEILING_DIRECTORIES=$(dirname "$(realpath "$checkout")")
export GIT_CEILING_DIRECTORIES
todo=()
for patch in "$folder"/*.patch; do
    name=$(basename "$patch") file=$(sed -n 's|^+++ b/||p' "$patch") state=absent
    # Not by git: a patched file keeps the line that the patch follows, so that it would fit again.
    if grep -qs '^ *from wlb_megatron import enable' "$checkout/$file"; then state=applied; fi
    case $action-$state in
    --check-applied) echo "$name: applied" ;;
    --apply-applied) echo "$name: applied already" ;;
    --revert-absent) echo "$name: was not applied" ;;
    *) todo+=("$patch") ;;
    esac
done
[ ${#todo[@]} -gt 0 ] || exit 0
# A hunk has no context below: without --unidiff-zero git takes that for the end of the file.
apply=(git -C "$checkout" apply --unidiff-zero)
if ! "${apply[@]}" "${check[@]}" "${reverse[@]}" "${todo[@]}"; then
    echo "apply.sh: nothing was changed. To merge (git marks conflicts in the file, and needs Megatron-LM's history):" >&2
    echo "    $(printf '%q ' "${apply[@]}" --3way "${reverse[@]}" "${todo[@]}")" >&2
    exit 1
fi
for patch in "${todo[@]}"; do echo "$(basename "$patch"): $outcome"; done
