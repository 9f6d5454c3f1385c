"""The main job's end, as a newcomer reads it."""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import main_job
from scripts.environment import cpu_environment
from wlb_megatron.documents import lengths

ROOT = Path(__file__).resolve().parents[1]


def test_the_end_says_what_balanced_the_step_what_gpus_take_and_where_the_picture_lies():
    summary = {
        "plain": {"micro_batches": 8.0, "gpu_tokens_per_second": 100.0},
        "wlb": {"micro_batches": 12.4, "gpu_tokens_per_second": 150.0},
    }
    lines = main_job.ending(summary, Path("out/timeline.png"), 3, Path("out/summary.json"), 64)
    text = "\n".join(lines)
    for phrase in (
        "wlb makes 12 micro-batches of like work",
        "On 16 GPUs, with documents and window 64 times as long: 1.50 times the tokens/s, predicted",
        "Picture of step 4: out/timeline.png",
        "took on this CPU means nothing",
    ):
        assert phrase in text
    assert max(map(len, lines)) <= 120


def test_the_steps_on_gpus_are_simulated_from_the_same_documents(tmp_path, monkeypatch):
    documents = np.tile([40, 600, 2048, 90, 5000, 300], 20)  # 5000 is above the window and left out
    monkeypatch.setattr(lengths, "read_lengths", lambda path: documents)
    options = argparse.Namespace(out=tmp_path, seq_length=2048, iterations=2, global_batch_size=4)
    simulated = main_job.simulate_on_gpus(options)
    assert set(simulated) == {"plain", "wlb"}
    assert simulated["wlb"][1] > simulated["plain"][1] > 1000 and simulated["plain"][0] > 100


@pytest.mark.megatron
def test_the_small_fine_tuning_job_trains_answers_alone(tmp_path):
    pytest.importorskip("transformers")
    script, flags = ROOT / "scripts" / "sft_job.py", f"--out {tmp_path} --iterations 3 --conversations 300"
    command = [sys.executable, str(script), *flags.split()]
    done = subprocess.run(command, env=cpu_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for words in ("train.jsonl: 270 conversations", "of them trained: those of answers"):
        assert words in done.stdout
