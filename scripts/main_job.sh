#!/usr/bin/env bash
# Sets everything up and runs the main job: a small GPT trained twice on this machine's CPUs, plain and with WLB.
# usage: scripts/main_job.sh [--out DIR] [--iterations N] ...   (scripts/main_job.sh --help names all)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$root/.venv/bin/python" "$root/scripts/main_job.py" "$@"
