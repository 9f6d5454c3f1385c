"""What several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
"""As in runs of Megatron: importing the compiler takes longer than all that it would compile."""


def without(program: str, reason: str) -> None:
    """Skip a test where a program is not installed; fail it where WLB_TESTS_NEED (browser,slurm,mount) names it."""
    if program in os.environ.get("WLB_TESTS_NEED", "").split(","):
        pytest.fail(f"{reason}, and WLB_TESTS_NEED asks for it")
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def no_job_before() -> None:
    """What a test leaves in the plugin's state is not the next one's."""
    from wlb_megatron.plugin.job_state import begin_job

    begin_job()


@pytest.fixture
def quick_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that let thresholds be found or settings searched, which takes longest, and test something else."""
    from wlb_megatron.analyze import analyze_command
    from wlb_megatron.packing.varlen import thresholds

    monkeypatch.setattr(analyze_command, "SEARCH", "none")
    monkeypatch.setattr(thresholds, "ITERATIONS", 16)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small .bin/.idx pair with documents of megatron_runs.LENGTHS."""
    from megatron_runs import LENGTHS, write_corpus

    prefix = tmp_path_factory.mktemp("corpus") / "documents"
    write_corpus(prefix, LENGTHS)
    return prefix
