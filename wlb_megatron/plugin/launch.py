"""`python -m wlb_megatron.launch SCRIPT ...`: the user's own training script, with Megatron's seams replaced."""

from __future__ import annotations

import os
import runpy
import sys

USAGE = """usage: torchrun ... -m wlb_megatron.launch pretrain_gpt.py <its flags> [--wlb-...]
       python -m wlb_megatron.launch --describe    print every Megatron symbol that is replaced, and why"""


def main() -> None:
    """Install the hooks, then run the script as __main__ with its own arguments."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit(USAGE)
    from wlb_megatron.plugin.versions import check_megatron

    check_megatron()
    from wlb_megatron.plugin import hooks

    if arguments[0] == "--describe":
        print(hooks.describe())
        return
    script = arguments[0]
    if not os.path.isfile(script):
        raise SystemExit(f"wlb_megatron.launch: no script {script}; give the path of pretrain_gpt.py first")
    hooks.install()
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
