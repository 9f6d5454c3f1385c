"""`python -m wlb_megatron.launch SCRIPT ...`: the user's own training script, with Megatron's seams replaced."""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys

from wlb_megatron.arguments import add_arguments
from wlb_megatron.plugin.flags.refusal_printing import checked, refuse

USAGE = """usage: torchrun ... -m wlb_megatron.launch pretrain_gpt.py <its flags> [--wlb-...]
       python -m wlb_megatron.launch pretrain_gpt.py --help    print Megatron's flags, then the plugin's
       python -m wlb_megatron.launch --describe    print every Megatron symbol that is replaced, and why"""


def main() -> None:
    """Install the hooks, then run the script as __main__ with its own arguments."""
    arguments = sys.argv[1:]
    if not arguments:
        raise SystemExit(USAGE)
    if arguments[0] in ("-h", "--help", "--describe"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may read enough
    if arguments[0] in ("-h", "--help"):
        print(USAGE, flags_help(), sep="\n\n")
        return
    script, describe = arguments[0], arguments[0] == "--describe"
    if not describe:
        if not os.path.isfile(script):
            refuse(f"no script {script}; give the path of pretrain_gpt.py first")
        # As Python does for a script: its folder first, so that a checkout's Megatron is the one that is looked at.
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    enable()
    if describe:
        from wlb_megatron.plugin import hooks

        print(hooks.describe())
        return
    sys.argv = arguments
    runpy.run_path(script, run_name="__main__")


def flags_help() -> str:
    """The --wlb-* flags as argparse shows them, without Megatron's: `pretrain_gpt.py --help` shows both."""
    parser = argparse.ArgumentParser(prog="--wlb-*", usage=argparse.SUPPRESS, add_help=False)
    return add_arguments(parser).format_help().strip()


def enable() -> None:
    """Check the versions and replace Megatron's symbols: what the launcher does, for a fork's own script to call.

    Before or after the script's Megatron imports, and before its arguments are parsed. SystemExit with one line where
    this Megatron is too old, or lacks what the plugin replaces.
    """
    from wlb_megatron.plugin.flags.versions import check_megatron

    checked(check_megatron)
    from wlb_megatron.plugin import hooks

    checked(hooks.install)
