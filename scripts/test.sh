#!/usr/bin/env bash
# Sets everything up and passes the tests: format, lint, types, shell scripts, then the suite (quick tests first).
# usage: scripts/test.sh [pytest arguments]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH" OMP_NUM_THREADS=1
unset PYTHONPATH PYTHONDONTWRITEBYTECODE # without cached bytecode, every child process compiles the package again
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
ruff format --check .
ruff check .
mypy
git ls-files -z '*.sh' '*.sbatch' .ci/run | xargs -0 -r shellcheck
# Two at a time: most tests wait for a process of their own, or for one core.
python -m pytest -n 2 --dist worksteal -m "not megatron"
python -m pytest -n 2 --dist worksteal -m megatron
