"""SIGKILL at random moments of a real run, each resumed: the script of 50 such kills, with three of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from megatron_runs import ROOT


@pytest.mark.megatron
def test_three_kills_change_neither_the_document_order_nor_a_bit_of_the_losses() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "kill_resume.py"), "3", "--seed", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills, each resumed: documents and losses equal" in done.stdout
