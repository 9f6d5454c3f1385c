"""The batch scripts: what they hold, and one run by a real Slurm with a requeue in the middle."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_runs import ROOT, cpu_environment, flags
from slurm_cluster import ask, cluster, missing, wait_for

SCRIPTS = sorted((ROOT / "scripts").glob("*.sbatch"))
EDIT = re.compile(r"# ---- the run: edit here ----\n(.*)# ---- end of the run ----\n", re.DOTALL)
STEPS = 40


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_batch_script_signals_early_requeues_and_resumes(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(script)], check=True)
    for needed in (
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "--exit-signal-handler",
        '--load "$CHECKPOINTS"',
        "scontrol requeue",
        "# export NCCL_",
        "MASTER_ADDR=${hosts[0]}",
    ):
        assert needed in text, needed


def test_the_container_script_differs_in_the_container_alone() -> None:
    plain, container = (
        (ROOT / "scripts" / f"{name}.sbatch").read_text() for name in ("pretrain", "pretrain_pyxis")
    )
    code = [[line for line in text.splitlines() if not line.startswith("# ")] for text in (plain, container)]
    added = [line.strip() for line in code[1] if line not in code[0]]
    removed = [line.strip() for line in code[0] if line not in code[1]]
    assert [line.split("=")[0].split(" ")[0] for line in added] == [
        "IMAGE",
        "MOUNTS",
        "PYTHON",
        "--container-image",
    ]
    assert [line.split("=")[0] for line in removed] == ["PYTHON"]


def edited(folder: Path, corpus: Path) -> Path:
    """scripts/pretrain.sbatch with its run edited to the small model on CPUs."""
    arguments = [
        *flags(context=2),
        "--global-batch-size",
        "2",
        "--data-path",
        str(corpus),
        "--save-interval",
        "1000",
    ]
    run = f"""PYTHON={sys.executable}
ENTRY=(-m wlb_megatron.pretrain_gpt)
CHECKPOINTS={folder}/checkpoints
TRAIN_ITERS={STEPS}
MODEL=({" ".join(arguments)} --num-workers 1)
LAYOUT=(--ckpt-format torch_dist --auto-detect-ckpt-format)
DATA=() TRAINING=() WLB=(--wlb-log {folder}/steps.jsonl)
"""
    text = (ROOT / "scripts" / "pretrain.sbatch").read_text()
    script = folder / "pretrain.sbatch"
    script.write_text(EDIT.sub(lambda _: run, text))
    return script


@pytest.fixture()
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with cluster(tmp_path) as environment:
        yield environment


@pytest.mark.megatron
def test_slurm_trains_over_two_tasks_and_goes_on_after_a_requeue(
    slurm: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    """Signalled as at the time limit: both tasks save, the job requeues itself, resumes, and ends when trained."""
    log = tmp_path / "job.log"
    sized = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0"]
    environment = {**cpu_environment(), **slurm}
    environment["PYTHONPATH"] = cpu_environment()["PYTHONPATH"]
    said = ask(
        ["sbatch", *sized, f"--output={log}", str(edited(tmp_path, corpus))],
        environment,
    )
    found = re.search(r"Submitted batch job (\d+)", said)
    assert found, said
    job = found[1]

    def told(text: str) -> bool:
        return log.exists() and text in log.read_text()

    try:
        wait_for(lambda: told("[wlb] iteration 3 ") or told("ended with"), 120)
        ask(["scancel", "--batch", "--signal=USR1", job], slurm)
        wait_for(lambda: told("queues itself again") or told("ended with"), 90)
        wait_for(lambda: told("ended with status"), 150)
    except TimeoutError as error:
        daemons = "".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("slurm*.log")))
        pytest.fail(f"{error}\n{log.read_text()[-6000:] if log.exists() else said}\n{daemons}")
    text = log.read_text()
    assert f"job {job}, start 0, from iteration 0," in text
    stopped = int(re.search(rf"stopped at iteration (\d+) of {STEPS}", text)[1])  # type: ignore[index]
    assert 3 <= stopped < STEPS
    assert f"job {job}, start 1, from iteration {stopped}," in text
    assert f"ended with status 0 at iteration {STEPS} of {STEPS}" in text
    trained = [int(number) for number in re.findall(r"\[wlb\] iteration (\d+) ", text)]
    assert trained == list(range(1, STEPS + 1))
    assert "Traceback" not in text
