"""What a user reads for each of the command lines in a file (JSON: a list of lists of flags); JSON on stdout.

Megatron's own parser and validation with the plugin's hooks, in one process, without starting a run.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path

from wlb_megatron.plugin import hooks
from wlb_megatron.plugin.take_over import KEPT_CHOICES


def last_line(arguments: list[str], world: int) -> str:
    """The last line that the command prints, or "accepted", with the sizes for which cuBLAS then keeps kernels."""
    from megatron.training import arguments as megatron

    os.environ |= {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}
    sys.argv = ["pretrain_gpt.py", *arguments]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            megatron.validate_args(megatron.parse_args(None, False), {})
    except SystemExit as refused:
        if isinstance(refused.code, str):
            return refused.code
        return (
            errors.getvalue().strip().splitlines()[-1]
            if errors.getvalue().strip()
            else f"exit {refused.code}"
        )
    except Exception:
        return "Traceback: " + traceback.format_exc().strip().splitlines()[-1]
    kept = os.environ.pop(KEPT_CHOICES, None)
    return "accepted" if kept is None else f"accepted, {kept} sizes"


if __name__ == "__main__":
    hooks.install()
    file = Path(sys.argv[1])
    os.chdir(file.parent)
    cases = json.loads(file.read_text())
    lines = [last_line(case["flags"], case["world"]) for case in cases]
    json.dump(lines, sys.stdout)
