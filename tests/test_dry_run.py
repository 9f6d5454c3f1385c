"""--wlb-dry-run: Megatron's parser and the plugin's refusals for any number of GPUs, in one process without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_cli import call
from test_launch_command import ROOT, write_index

pytestmark = pytest.mark.megatron

_TEXT = """
--num-layers 8 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --seq-length 1024 --max-position-embeddings 1024 --tensor-model-parallel-size 2
--sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1
--global-batch-size 16 --bf16 --use-distributed-optimizer --overlap-grad-reduce --tokenizer-type NullTokenizer
--vocab-size 257 --train-iters 100 --lr 1e-3 --eval-iters 0 --num-workers 0 --split 100,0,0
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--no-gradient-accumulation-fusion
"""
FLAGS = _TEXT.split()


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    lengths = np.minimum(np.random.default_rng(3).lognormal(5.0, 1.2, 900), 1024).astype(np.int64) + 1
    write_index(tmp_path / "corpus", lengths)
    (tmp_path / "corpus.bin").write_bytes(bytes(2 * int(lengths.sum())))
    return [*FLAGS, "--data-path", str(tmp_path / "corpus")]


def dry_run(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "wlb_megatron.pretrain_gpt", *flags, "--wlb-dry-run"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, cwd=ROOT)


def test_a_dry_run_prints_what_is_set_and_what_analyze_predicts(
    job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    done = dry_run(*job, "--wlb-world-size", "64")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "data-parallel size: 8" in done.stdout and "sets --calculate-per-token-loss True" in done.stdout
    own = ["analyze", "--no-split", "--search", "none", "--world-size", "64", "--gpu-memory", "80", "--"]
    code, out, err = call(capsys, *own, *job)
    assert code == 0, err
    _, verdict = done.stdout.split(out)
    assert verdict.startswith("> wlb_megatron: Megatron and the plugin take these flags on 64 GPUs")
    assert "predicted speed-up" in out and "of activations" in out
    assert "flags: " not in out, "nothing else was tried"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--wlb-world-size 12", "world size"),
        ("--wlb-world-size 24", "global_batch_size"),
        ("--wlb-world-size 8 --attention-dropout 0.1", "--attention-dropout"),
        ("", "--wlb-dry-run needs --wlb-world-size"),
    ],
)
def test_a_dry_run_of_flags_that_are_refused_exits_with_2_and_the_line(
    flags: str, line: str, job: list[str]
) -> None:
    done = dry_run(*job, *flags.split())
    assert done.returncode == 2, done.stdout[-500:]
    assert line in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
