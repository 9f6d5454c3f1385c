#!/usr/bin/env bash
# Sets everything up and runs the main job: a small GPT trained twice on this machine's CPUs, plain and with WLB.
# usage: scripts/main_job.sh [--out DIR] [--iterations N] ...   (see scripts/main_job.py --help)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" "$root/scripts/main_job.py" "$@"
