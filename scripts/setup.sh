#!/usr/bin/env bash
# Makes the project's own virtual environment in .venv (Python 3.12, megatron-core, torch, this package) and checks it.
# Does nothing when it is already made for this setup.py. Downloads about 3 GB the first time.
# usage: scripts/setup.sh          then: . .venv/bin/activate
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
    local candidate found base='import sys; print(sys._base_executable); sys.exit(sys.version_info[:2] != (3, 12))'
    for candidate in python3.12 python3 "$HOME"/.pyenv/versions/3.12*/bin/python3.12 /usr/local/bin/python3.12; do
        # Of an active .venv, which is about to be removed, the Python that it was made from.
        if found=$("$candidate" -c "$base" 2>/dev/null); then
            echo "$found"
            return
        fi
    done
    echo "Python 3.12 is needed (megatron-core's wheel is built for it) and was not found: install it," >&2
    echo "e.g. 'apt-get install python3.12 python3.12-venv', 'pyenv install 3.12' or 'uv python install 3.12'." >&2
    exit 1
}

stamp=$(sha256sum "$root/setup.py" "$root/scripts/setup.sh" | cut -d' ' -f1 | tr -d '\n')
exec 9>"$root/.venv.lock"
flock 9
if [ "$(cat "$root/.venv/stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
python=$(find_python)
echo "> setting up $root/.venv with $("$python" --version) (a few minutes the first time)"
rm -rf "$root/.venv"
"$python" -m venv "$root/.venv"
"$root/.venv/bin/python" -m pip install --quiet --upgrade pip 2>&1 | grep -v WARNING || true
"$root/.venv/bin/python" -m pip install --quiet --editable "${root}[cpu,dev]"
"$root/.venv/bin/python" -c 'import megatron.core, numpy, torch, wlb_megatron'
echo "$stamp" >"$root/.venv/stamp"
