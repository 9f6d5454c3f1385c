"""What several test files share."""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
"""As in runs of Megatron: importing the compiler takes longer than all that it would compile."""


def without(program: str, reason: str) -> None:
    """Skip a test where a program is not installed; fail it where WLB_TESTS_NEED (slurm,mount) names it."""
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
    from wlb_megatron.packing import sample_choices

    monkeypatch.setattr(analyze_command, "SEARCH", "none")
    monkeypatch.setattr(sample_choices, "ITERATIONS", 16)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str, str]]:
    """Runs a line of `wlb-megatron` in this process: its exit code, stdout and stderr."""
    from wlb_megatron import cli

    def run(line: str) -> tuple[int, str, str]:
        code = cli.main(shlex.split(line))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def printed(command: Callable[[str], tuple[int, str, str]]) -> Callable[[str], str]:
    """Runs a line that works and has nothing to say on stderr: its stdout."""

    def run(line: str) -> str:
        code, out, err = command(line)
        assert (code, err) == (0, ""), err
        return out

    return run


@pytest.fixture
def reported(command: Callable[[str], tuple[int, str, str]]) -> Callable[[str], Any]:
    """Runs a line that works: its JSON, with which nothing else is on stdout."""

    def run(line: str) -> Any:
        name, flags = line.split(maxsplit=1)
        code, out, err = command(f"{name} --json - {flags}")
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.fixture
def refused(command: Callable[[str], tuple[int, str, str]]) -> Callable[[str], str]:
    """Runs a line that is refused with exit code 2 and one line on stderr alone: that line."""

    def run(line: str) -> str:
        code, out, err = command(line)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("wlb_megatron: error: ")
        return err

    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small .bin/.idx pair with documents of megatron_runs.LENGTHS."""
    from megatron_runs import LENGTHS, write_corpus

    prefix = tmp_path_factory.mktemp("corpus") / "documents"
    write_corpus(prefix, LENGTHS)
    return prefix


@pytest.fixture(scope="module")
def single(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """single(*flags): what one process of the small model sees, which runs once for all tests of a file."""
    from megatron_runs import flags, train

    @functools.cache
    def run(*more: str) -> list[dict[str, Any]]:
        arguments = flags(f"--data-path {corpus}", *more)
        return train(arguments, 1, tmp_path_factory.mktemp("single"))

    return run
