"""Short-lived rank processes of a check on this machine: what each prints, or why the first that fails does."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO

from wlb_megatron.errors import WlbError

_PAUSE = 0.05
"""Seconds between two looks at the ranks."""


def run_ranks(commands: Sequence[Sequence[str]], environment: Mapping[str, str], seconds: float) -> list[str]:
    """Run one command for each rank, all at once. Returns what each prints to stdout.

    Once a rank fails, the others are ended, because they would wait for it. Raises WlbError with the last line of its
    stderr, TimeoutError after `seconds`, OSError if a process cannot start.
    """
    with ExitStack() as stack:
        # Files, not pipes: a rank that prints more than a pipe holds must not wait for a reader.
        outputs, errors = ([_scratch(stack) for _ in commands] for _ in range(2))
        ranks: list[subprocess.Popen[str]] = []
        try:
            for command, out, err in zip(commands, outputs, errors, strict=True):
                ranks.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True
                    )
                )
            failed = _first_failure(ranks, time.monotonic() + seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if failed is not None:
            lines = _text(errors[failed]).strip().splitlines()
            line = lines[-1] if lines else f"a rank ended with status {ranks[failed].returncode}"
            raise WlbError(line.removeprefix(f"[rank{failed}]: "))
        return [_text(out) for out in outputs]


def _first_failure(ranks: Sequence[subprocess.Popen[str]], deadline: float) -> int | None:
    """The first rank that ends with another status than 0; None if all end well."""
    while True:
        statuses = [rank.poll() for rank in ranks]
        for rank, status in enumerate(statuses):
            if status:
                return rank
        if None not in statuses:
            return None
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_PAUSE)


def _scratch(stack: ExitStack) -> IO[str]:
    return stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
