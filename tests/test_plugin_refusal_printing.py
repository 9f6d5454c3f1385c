"""A rank that must stop at the start says why, with its number and host; what all ranks share is said once a node."""

from __future__ import annotations

import socket
from pathlib import Path

import forked_ranks
import pytest
from megatron_runs import cpu_environment, flags

from wlb_megatron.plugin.flags.refusal_printing import checked
from wlb_megatron.refusals import Refused, RefusedHere

HOST = socket.gethostname()


def exit_code(refusal: Refused, rank: str, local_rank: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """What a rank exits with."""

    def check() -> None:
        raise refusal

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as ended:
        checked(check)
    return ended.value.code


def test_a_flag_that_is_refused_is_told_once_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(Refused("drop it"), "0", "0", monkeypatch) == "drop it"
    assert exit_code(Refused("drop it"), "1", "1", monkeypatch) == 1
    assert exit_code(Refused("drop it"), "8", "0", monkeypatch) == f"rank 8 on {HOST}: drop it"


def test_a_refusal_is_prefixed_once_though_checks_are_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")

    def check() -> None:
        raise Refused("drop it")

    with pytest.raises(Refused, match=f"^rank 8 on {HOST}: drop it$"):
        checked(lambda: checked(check))


def test_a_file_that_is_refused_is_told_by_each_rank_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(RefusedHere("no file"), "0", "0", monkeypatch) == "no file"
    assert exit_code(RefusedHere("no file"), "5", "5", monkeypatch) == f"rank 5 on {HOST}: no file"


ONE_RANK_SEES_NO_FILES = """
import os, runpy, sys
if os.environ["RANK"] == "1":
    sys.argv[sys.argv.index("--data-path") + 1] = "/not/mounted"
runpy.run_module("wlb_megatron.pretrain_gpt", run_name="__main__", alter_sys=True)
"""


@pytest.mark.megatron
def test_a_rank_that_alone_does_not_find_the_corpus_says_so(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ONE_RANK_SEES_NO_FILES)
    arguments = [*flags(), "--global-batch-size", "2", "--train-iters", "2", "--data-path", str(corpus)]
    done = forked_ranks.run([str(script)], arguments, 2, cpu_environment(), timeout=120)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "wlb_megatron: " in line]
    assert len(lines) == 1 and lines[0].startswith(
        f"rank 1 on {HOST}: wlb_megatron: cannot read index /not/mounted"
    )
