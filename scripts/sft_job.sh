#!/usr/bin/env bash
# Sets everything up and fine-tunes a small GPT on conversations on this machine's CPUs.
# usage: scripts/sft_job.sh [--out DIR] [--iterations N] ...   (scripts/sft_job.sh --help names all)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$root/.venv/bin/python" "$root/scripts/sft_job.py" "$@"
