"""The batch script: what it holds, and one run by a real Slurm with a requeue in the middle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_runs import ROOT, cpu_environment, flags
from slurm_cluster import ask, cluster, missing, wait_for

SCRIPT = ROOT / "scripts" / "pretrain.sbatch"
EDIT = re.compile(r"# ---- the run: edit here ----\n(.*)# ---- end of the run ----\n", re.DOTALL)
STEPS = 40


def test_the_batch_script_signals_early_requeues_and_resumes() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
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


def edited(folder: Path, corpus: Path) -> Path:
    """The batch script with its run edited to the small model on CPUs."""
    arguments = [
        *flags(context=2),
        "--global-batch-size",
        "2",
        "--data-path",
        str(corpus),
        "--save-interval",
        "1000",
    ]
    run = f"""IMAGE=
PYTHON={sys.executable}
ENTRY=(-m wlb_megatron.pretrain_gpt)
CHECKPOINTS={folder}/checkpoints
TRAIN_ITERS={STEPS}
MODEL=({" ".join(arguments)} --num-workers 1)
LAYOUT=(--ckpt-format torch_dist --auto-detect-ckpt-format)
DATA=() TRAINING=() WLB=(--wlb-log {folder}/steps.jsonl)
"""
    text = SCRIPT.read_text()
    script = folder / "pretrain.sbatch"
    script.write_text(EDIT.sub(lambda _: run, text))
    return script


SRUN = """#!/usr/bin/env bash
# Stands for srun: notes its own arguments, runs the task for ranks 0, 1 and 2 of 3, one on each node, ends with STATUS.
# With SIGNAL, the batch script is signalled first.
printf '%s\\0' "$@" >"$TOLD/srun"
[ -z "$SIGNAL" ] || kill -s "$SIGNAL" "$PPID"
while [ "${1:0:1}" = - ]; do shift; done
for rank in 0 1 2; do SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NTASKS=3 "$@"; done
exit "$STATUS"
"""
TRAINER = """#!/usr/bin/env bash
# Stands for the trainer: says what it was given, saves the checkpoint of iteration SAVED.
echo "rank $RANK of $WORLD_SIZE on GPU $LOCAL_RANK, rendezvous $MASTER_ADDR:$MASTER_PORT"
[ -z "$SAVED" ] || echo "$SAVED" >"$PWD/checkpoints/night/latest_checkpointed_iteration.txt"
printf '%s\\n' "$@" >"$TOLD/trainer"
echo "$PYTORCH_CUDA_ALLOC_CONF" >"$TOLD/allocator"
"""


def run_with_stubs(
    script: Path, folder: Path, status: int, saved: str, *flags: str, signal: str = "", **exported: str
) -> tuple[int, str, list[str]]:
    """A batch script run with a srun that starts three tasks here: exit code, log, and srun's arguments."""
    (folder / "bin").mkdir(exist_ok=True)
    hosts, asked = "printf 'node%s\\n' 7 8 9", 'echo "$*" >>"$TOLD/scontrol"'
    for name, text in (
        ("srun", SRUN),
        ("python3", TRAINER),
        ("scancel", "#!/usr/bin/env bash\n"),
        ("scontrol", f'#!/usr/bin/env bash\nif [ "$1" = show ]; then {hosts}; else {asked}; fi\n'),
    ):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": "/home/user",
        "TOLD": str(folder),
        "STATUS": str(status),
        "SAVED": saved,
        "SIGNAL": signal,
        "SLURM_JOB_ID": "40123",
        "SLURM_JOB_NAME": "night",
        "SLURM_JOB_NODELIST": "node[7-9]",
        **exported,
    }
    done = subprocess.run(
        ["bash", str(script), *flags],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout, (folder / "srun").read_text().split("\0")


@pytest.mark.parametrize("image", ["", "/images/a pytorch.sqsh"])
def test_the_batch_script_starts_every_rank_with_what_torch_and_megatron_ask_for(
    image: str, tmp_path: Path
) -> None:
    script = tmp_path / "pretrain.sbatch"
    text = SCRIPT.read_text()
    assert text.count("\nIMAGE= #") == 1
    script.write_text(text.replace("\nIMAGE= #", f"\nIMAGE='{image}' #"))
    exported = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"} if image else {}
    code, log, asked = run_with_stubs(script, tmp_path, 0, "50000", "--lr", "1e-4", **exported)
    assert code == 0, log
    assert "start 0, from iteration 0, on node7 node8 node9" in log
    assert "ended with status 0 at iteration 50000 of 50000" in log
    # The first and the last rank write to the job's log, the others to their own.
    where = "rendezvous node7:10123"
    assert f"rank 0 of 3 on GPU 0, {where}" in log and f"rank 2 of 3 on GPU 0, {where}" in log
    assert "rank 1 of 3" not in log
    assert (
        tmp_path / "logs" / "night-40123" / "rank-1.log"
    ).read_text() == f"rank 1 of 3 on GPU 0, {where}\n"
    options = asked[: asked.index("bash")]
    assert options[:2] == ["--kill-on-bad-exit=1", "--mpi=none"]
    container = dict(option.removeprefix("--").partition("=")[::2] for option in options[2:])
    if not image:
        assert not container
    else:
        assert container == {
            "container-image": image,
            "container-mounts": f"{tmp_path}:{tmp_path},/home/user:/home/user",
            "container-workdir": str(tmp_path),
            "no-container-mount-home": "",
            "container-env": container["container-env"],
        }
        # An image's own values win over all others.
        for name in container["container-env"].split(","):
            assert re.search(rf"\b{name}=", text), name
        assert "PYTORCH_CUDA_ALLOC_CONF" in container["container-env"]
    allocator = (tmp_path / "allocator").read_text().strip()
    assert allocator == ("max_split_size_mb:512" if image else "expandable_segments:True")
    arguments = (tmp_path / "trainer").read_text().splitlines()
    assert arguments[:3] == ["-m", "wlb_megatron.launch", "/home/user/Megatron-LM/pretrain_gpt.py"]
    assert arguments[-2:] == ["--lr", "1e-4"], "what follows the script's name comes last"
    assert "--exit-signal-handler" in arguments and "#" not in "".join(arguments)
    assert arguments[arguments.index("--wlb-log") + 1] == f"{tmp_path}/logs/night-40123/steps.jsonl"


@pytest.mark.parametrize(
    ("saved", "status", "queued", "message"),
    [
        (
            "700",
            1,
            True,
            r"failed with status 1 .*checkpoint at iteration 700 of 50000: the job queues itself",
        ),
        ("600", 1, False, "ended with status 1 at iteration 600 of 50000"),  # nothing new since its start
        ("", 9, False, "ended with status 9 at iteration 600 of 50000"),
        ("50000", 1, False, "ended with status 1 at iteration 50000 of 50000"),
        ("700", 0, False, "ended with status 0 at iteration 700 of 50000"),  # --exit-interval and the like
    ],
)
def test_a_run_that_fails_is_queued_again_only_where_it_had_come_further(
    saved: str, status: int, queued: bool, message: str, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints" / "night"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("600")
    code, log, _ = run_with_stubs(SCRIPT, tmp_path, status, saved)
    assert re.search(message, log), log
    assert code == (0 if queued else status)
    asked = tmp_path / "scontrol"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 40123\n" if queued else "")


def test_a_job_signalled_three_times_before_it_has_saved_is_not_queued_again(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "night").mkdir(parents=True)
    asked, queued = tmp_path / "scontrol", []
    for start, saved in enumerate(["", "", "700", "", "", ""]):
        code, log, _ = run_with_stubs(SCRIPT, tmp_path, 0, saved, signal="USR1")
        assert "signalled: the trainers save and exit" in log
        queued.append(asked.exists())
        asked.unlink(missing_ok=True)
        assert code == (0 if queued[-1] else 1), (start, log)
    assert queued == [True, True, True, True, True, False], "saving begins the count anew"
    assert "signalled in three starts in a row before it saved a checkpoint: raise --time" in log


def test_a_release_checkpoint_counts_as_iteration_0(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints" / "night"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("release")
    _, log, _ = run_with_stubs(SCRIPT, tmp_path, 1, "")
    assert "from iteration 0," in log and "ended with status 1 at iteration 0 of" in log


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
    answer = ask(
        ["sbatch", *sized, f"--output={log}", str(edited(tmp_path, corpus))],
        environment,
    )
    submitted = re.search(r"Submitted batch job (\d+)", answer)
    assert submitted, answer
    job = submitted[1]

    def logged(text: str) -> bool:
        return log.exists() and text in log.read_text()

    try:
        wait_for(lambda: logged("[wlb] iteration 3 ") or logged("ended with"), 120)
        ask(["scancel", "--batch", "--signal=USR1", job], slurm)
        wait_for(lambda: logged("queues itself again") or logged("ended with"), 90)
        wait_for(lambda: logged("ended with status"), 150)
    except TimeoutError as error:
        daemons = "".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("slurm*.log")))
        pytest.fail(f"{error}\n{log.read_text()[-6000:] if log.exists() else answer}\n{daemons}")
    text = log.read_text()
    assert f"job {job}, start 0, from iteration 0," in text
    stopped = int(re.search(rf"stopped at iteration (\d+) of {STEPS}", text)[1])  # type: ignore[index]
    assert 3 <= stopped < STEPS
    assert f"job {job}, start 1, from iteration {stopped}," in text
    assert f"ended with status 0 at iteration {STEPS} of {STEPS}" in text
    trained = [int(number) for number in re.findall(r"\[wlb\] iteration (\d+) ", text)]
    assert trained == list(range(1, STEPS + 1))
    assert "Traceback" not in text
