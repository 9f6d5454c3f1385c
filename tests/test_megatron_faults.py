"""Faults of files and machines in a real run: a rank that cannot go on ends soon, with a status that tells it."""

import os
import threading
import time
from pathlib import Path

import pytest
from megatron_runs import (
    LENGTHS,
    cpu_environment,
    failure,
    flags,
    launch,
    output_of,
    refusal_of,
    rewrite_corpus,
    run_script,
    write_corpus,
)

pytestmark = pytest.mark.megatron

LIMIT = 200
"""Seconds within which a run that fails must have ended, its start included; a frozen one never does."""


def truncate_when(log: Path, lines: int, victim: Path) -> None:
    """Cut `victim` to nothing once `log` has so many lines."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        if log.exists() and log.read_text().count("\n") >= lines:
            os.truncate(victim, 0)
            return
        time.sleep(0.01)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_whose_tokens_cannot_be_read_any_more_ends_though_workers_ignore_the_signal(workers, tmp_path):
    prefix, log = tmp_path / "documents", tmp_path / "steps.jsonl"
    write_corpus(prefix, LENGTHS * 4)
    run = f"--data-path {prefix} --split 1,0,0 --global-batch-size 2 --train-iters 100000"
    process = "always" if workers == "2" else "never"
    arguments = flags(run, f"--num-workers {workers} --wlb-plan-process {process} --wlb-log {log}")
    arguments.append("--exit-signal-handler")
    fault = threading.Thread(target=truncate_when, args=(log, 3, prefix.with_suffix(".bin")))
    fault.start()
    done = launch(arguments, 1, timeout=LIMIT)
    fault.join()
    assert done.returncode != 0
    assert f"{prefix}.bin ends before byte" in done.stderr


DROPS_HALF = """
from wlb_megatron.packing.baselines import OriginalPacker

class DropsHalf(OriginalPacker):
    def pack(self, iteration, arrived, batch, draining=False):
        return super().pack(iteration, arrived[::2] if iteration > 1 else arrived, batch, draining)
"""

WITH_IT = """
from wlb_megatron.plugin import pretrain_gpt
from wlb_megatron.registry import PACKERS, PackerEntry

PACKERS["original"] = PackerEntry("drops_half:DropsHalf", "drops half")
pretrain_gpt.main()
"""


@pytest.mark.parametrize("process", ["always", "never"])
def test_a_run_whose_packer_loses_documents_ends_with_a_line_before_it_trains_them(process, tmp_path):
    write_corpus(tmp_path / "documents", LENGTHS * 4)
    (tmp_path / "drops_half.py").write_text(DROPS_HALF)  # a module, so that the planning process finds it
    path = os.pathsep.join([str(tmp_path), cpu_environment().get("PYTHONPATH", "")])
    run = f"--data-path {tmp_path}/documents --split 1,0,0 --global-batch-size 2 --train-iters 20"
    arguments = flags(run, f"--wlb-packing original --wlb-plan-process {process}")
    done = run_script(WITH_IT, arguments, tmp_path, PYTHONPATH=path)
    assert done.returncode == 1
    assert "DropsHalf was given" in done.stderr.strip().splitlines()[-1], failure(done)
    assert "Traceback" not in done.stderr
    assert "[wlb] iteration 2 " in done.stdout and "[wlb] iteration 3 " not in done.stdout


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv.pop(1))))
from wlb_megatron.plugin import pretrain_gpt
pretrain_gpt.main()
"""


def test_a_blend_of_many_corpora_and_a_large_batch_train_though_few_files_are_allowed_at_first(tmp_path):
    write_corpus(tmp_path / "0", [20, 30, 7])
    for number in range(1, 300):
        for kind in ("bin", "idx"):
            os.link(tmp_path / f"0.{kind}", tmp_path / f"{number}.{kind}")
    blend = " ".join(f"1 {tmp_path}/{number}" for number in range(300))
    run = f"--data-path {blend} --split 1,0,0 --train-iters 3 --global-batch-size 64 --num-workers 2"
    done = run_script(FEW_FILES, ["8192", *flags(run)], tmp_path)
    assert done.returncode == 0, failure(done)
    assert "[wlb] iteration 3 " in done.stdout
    # The hard limit is too low: one line at the start, and the cure.
    done = run_script(FEW_FILES, ["512", *flags(run)], tmp_path)
    assert done.returncode == 1
    assert "the mapped indices of all corpora need 300 open files, 556 with all others" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_checkpoint_refuses_is_told_once_a_node(corpus, tmp_path):
    saves = f"--save {tmp_path} --load {tmp_path} --save-interval 1 --ckpt-format torch"
    run = f"--data-path {corpus} --split 1,0,0 --global-batch-size 2 --train-iters 2"
    arguments = flags(run, saves, context=2)
    output_of([*arguments, "--exit-interval", "1"], 2, timeout=LIMIT)
    for changed, line in (
        ("--wlb-quadratic-at 77", "cannot resume with another cost model: --wlb-quadratic-at was"),
        ("--global-batch-size 4", "the checkpoint's learning rate cannot go on (OptimizerParam"),
    ):
        assert refusal_of([*arguments, *changed.split()], 2, timeout=LIMIT).count(line) == 1


def test_a_token_id_outside_the_vocabulary_ends_the_run_on_tensor_parallel_ranks(tmp_path):
    """Each rank's embedding would take it for one of the other's rows, and the loss would look fine."""
    documents = write_corpus(tmp_path / "corpus", LENGTHS)
    documents[17][60] = 4999
    rewrite_corpus(tmp_path / "corpus", documents)
    run = f"--data-path {tmp_path}/corpus --global-batch-size 4 --train-iters 8 --split 1,0,0 --num-workers 1"
    # A rank other than 0 puts its number and host before the line.
    last = refusal_of(flags(run, tensor=2), 2).strip().splitlines()[-1]
    assert last.startswith("wlb_megatron: error: ")
    assert f"{tmp_path}/corpus: document 17 has token id 4999 at token 60" in last
