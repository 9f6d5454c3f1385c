"""A rank that must stop at the start says why, with its number and host; what all ranks share is said once a node."""

import json
import socket
import subprocess
import sys

import pytest
from megatron_runs import cpu_environment, flags, free_port, run_script

from wlb_megatron.errors import PREFIX, WlbError
from wlb_megatron.plugin.flags import refusal_printing
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
        checked(lambda: checked(check))  # prefixed once though checks are nested
    return ended.value.code


def test_a_flag_that_is_refused_is_told_once_a_node_and_a_file_by_each_rank_that_fails(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(refusal_printing.time, "sleep", waited.append)
    assert exit_code(Refused("drop it"), "0", "0", monkeypatch) == f"{PREFIX} drop it"
    assert exit_code(Refused("drop it"), "8", "0", monkeypatch) == f"{PREFIX} rank 8 on {HOST}: drop it"
    assert not waited
    # A rank that nobody ends while it waits for the first rank of its node speaks, too.
    assert exit_code(Refused("drop it"), "1", "1", monkeypatch) == f"{PREFIX} rank 1 on {HOST}: drop it"
    assert waited == [refusal_printing.PATIENCE]
    assert exit_code(RefusedHere("no file"), "0", "0", monkeypatch) == f"{PREFIX} no file"
    assert exit_code(RefusedHere("no file"), "5", "5", monkeypatch) == f"{PREFIX} rank 5 on {HOST}: no file"


def test_each_line_has_the_prefix_once_and_torchrun_gets_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    lines = f"{PREFIX} drop it\n{PREFIX} and that"
    assert exit_code(Refused(f"drop it\n{PREFIX} and that"), "0", "0", monkeypatch) == lines
    assert json.loads((tmp_path / "error.json").read_text())["message"] == lines


@pytest.mark.parametrize("error", [WlbError("no keys"), RuntimeError("wlb_megatron: no keys")])
def test_an_error_of_the_plugin_in_training_ends_with_the_same_line_after_its_stack(
    error, monkeypatch, capsys
):
    def train() -> None:
        raise error

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(RefusedHere) as ended:
        checked(lambda: checked(train))
    assert ended.value.code == f"{PREFIX} rank 3 on {HOST}: no keys"
    assert capsys.readouterr().err.count("Traceback") == 1
    with pytest.raises(KeyError):
        checked(lambda: {}["another's"])


SLOW_FIRST_RANK = "[ $RANK = 0 ] && sleep 8; exec $PYTHON -m wlb_megatron.pretrain_gpt $FLAGS"


@pytest.mark.megatron
def test_ranks_that_are_ready_first_do_not_end_the_one_that_says_why(corpus):
    """The other ranks' end makes torchrun kill rank 0 before it has spoken."""
    arguments = flags(f"--global-batch-size 2 --train-iters 2 --data-path {corpus} --attention-dropout 0.1")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*command, "--master-port", str(free_port()), "bash", "-c", SLOW_FIRST_RANK],
        env={**cpu_environment(), "PYTHON": sys.executable, "FLAGS": " ".join(arguments)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if PREFIX in line]
    assert said[0].startswith(f"{PREFIX} --attention-dropout")
    assert said[1:] == [f"  traceback : {said[0]}"], "torchrun repeats it in its last lines"


ONE_RANK_SEES_NO_FILES = """
import os, runpy, sys
if os.environ["RANK"] == "1":
    sys.argv[sys.argv.index("--data-path") + 1] = "/not/mounted"
runpy.run_module("wlb_megatron.pretrain_gpt", run_name="__main__", alter_sys=True)
"""


@pytest.mark.megatron
def test_a_rank_that_alone_does_not_find_the_corpus_says_so(corpus, tmp_path):
    arguments = flags(f"--global-batch-size 2 --train-iters 2 --data-path {corpus}")
    done = run_script(ONE_RANK_SEES_NO_FILES, arguments, tmp_path, 2)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if PREFIX in line]
    said = f"{PREFIX} rank 1 on {HOST}: cannot read index /not/mounted"
    assert len(lines) == 1 and lines[0].startswith(said)
