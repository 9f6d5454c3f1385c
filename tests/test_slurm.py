"""The batch script: what it holds, and one run by a real Slurm with a requeue in the middle."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import without
from megatron_runs import ROOT, cpu_environment, flags, small_disk
from slurm_cluster import ask, cluster, missing, wait_for

SCRIPT = ROOT / "scripts" / "pretrain.sbatch"
EDIT = re.compile(r"# ---- the run: edit here ----\n(.*)# ---- end of the run ----\n", re.DOTALL)
STEPS = 40


def test_the_batch_script_signals_early_requeues_and_resumes():
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
    job = f"--global-batch-size 2 --data-path {corpus} --save-interval 1000 --num-workers 1"
    run = f"""IMAGE=
PYTHON={sys.executable}
ENTRY=(-m wlb_megatron.pretrain_gpt)
CHECKPOINTS={folder}/checkpoints
TRAIN_ITERS={STEPS}
RESTARTS=3
MODEL=({" ".join(flags(job, context=2))})
LAYOUT=(--ckpt-format torch_dist --auto-detect-ckpt-format)
DATA=() TRAINING=() WLB=(--wlb-log {folder}/steps.jsonl)
"""
    script = folder / "pretrain.sbatch"
    script.write_text(EDIT.sub(lambda _: run, SCRIPT.read_text()))
    return script


@pytest.fixture
def checkpoints(tmp_path):
    """The folder of the job's checkpoints."""
    folder = tmp_path / "checkpoints" / "night"
    folder.mkdir(parents=True)
    return folder


SRUN = """#!/usr/bin/env bash
# Stands for srun: notes its own arguments, runs the task for ranks 0, 1 and 2 of 3, one on each node, ends with STATUS.
# With SIGNAL, the batch script is signalled first.
printf '%s\\0' "$@" >"$TOLD/srun"
[ -z "$SIGNAL" ] || kill -s "$SIGNAL" "$PPID"
while [ "${1:0:1}" = - ]; do shift; done
[ "$STATUS" = 0 ] || echo "srun: error: node8: task 1: Exited with exit code $STATUS" >&2
for rank in 0 1 2; do SLURMD_NODENAME=node$((7 + rank)) SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NTASKS=3 "$@"; done
exit "$STATUS"
"""
TRAINER = """#!/usr/bin/env bash
# Stands for the trainer: says what it was given, saves the checkpoint of iteration SAVED.
echo "rank $RANK of $WORLD_SIZE on GPU $LOCAL_RANK, rendezvous $MASTER_ADDR:$MASTER_PORT"
[ -z "$SAVED" ] || echo "$SAVED" >"$PWD/checkpoints/night/latest_checkpointed_iteration.txt"
printf '%s\\n' "$@" >"$TOLD/trainer"
echo "$PYTORCH_CUDA_ALLOC_CONF $CUDA_DEVICE_MAX_CONNECTIONS $SRUN_CPUS_PER_TASK" >"$TOLD/environment"
[ -z "$SAYS" ] || echo "$SAYS" >&2
"""


SCONTROL = """#!/usr/bin/env bash
# Stands for scontrol: expands the job's nodes and lists of names, knows the job's EXCLUDED nodes, notes all else.
case "$1 $2 $3" in
    "show hostnames node[7-9]") printf 'node%s\\n' 7 8 9 ;;
    "show hostnames "*) tr , '\\n' <<<"$3" ;;
    "show job "*) echo "   ReqNodeList=(null) ExcNodeList=${EXCLUDED:-(null)}" ;;
    *) echo "$*" >>"$TOLD/scontrol" ;;
esac
"""


def run_with_stubs(
    script: Path, folder: Path, status: int, saved: str, *flags: str, signal: str = "", **exported: str
) -> tuple[int, str, list[str]]:
    """A batch script run with a srun that starts three tasks here: exit code, log, and srun's arguments."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in (
        ("srun", SRUN),
        ("python3", TRAINER),
        ("scancel", "#!/usr/bin/env bash\n"),
        ("squeue", '#!/usr/bin/env bash\n[ "$2" != --jobs=40120 ] || echo 40120 is running\n'),
        ("sinfo", "#!/usr/bin/env bash\nprintf 'node%s\\n' $USABLE\n"),
        ("scontrol", SCONTROL),
    ):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    job = f"""STATUS={status} SAVED={saved} SIGNAL={signal} SAYS= SLURM_JOB_ID=40123 SLURM_JOB_NAME=night
    SLURM_JOB_NODELIST=node[7-9] SLURM_JOB_NUM_NODES=3 SLURM_JOB_PARTITION=all SLURM_CPUS_ON_NODE=96
    SLURM_TASKS_PER_NODE=1(x3) HOME=/home/user TOLD={folder}"""
    environment = dict(setting.split("=", 1) for setting in job.split())
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment |= {"PATH": path, "USABLE": "7 8 9", **exported}
    command = ["bash", str(script), *flags]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert not [line for line in done.stderr.splitlines() if line.startswith("/")], done.stderr  # of bash
    return done.returncode, done.stdout, (folder / "srun").read_text().split("\0")


@pytest.mark.parametrize("image", ["", "/images/a pytorch.sqsh"])
def test_the_batch_script_starts_every_rank_with_what_torch_and_megatron_ask_for(image, tmp_path):
    script = tmp_path / "pretrain.sbatch"
    text = SCRIPT.read_text()
    assert text.count("\nIMAGE= #") == 1
    script.write_text(text.replace("\nIMAGE= #", f"\nIMAGE='{image}' #"))
    exported = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "NCCL_IB_HCA": "mlx5", "GLOO_LEVEL": "1"}
    exported = exported if image else {}
    code, log, asked = run_with_stubs(script, tmp_path, 0, "50000", "--lr", "1e-4", **exported)
    assert code == 0, log
    assert "start 0, from iteration 0, on node7 node8 node9" in log
    assert "ended with status 0 at iteration 50000 of 50000" in log
    # The first and the last rank write to the job's log, the others to their own.
    where = "rendezvous node7:10123"
    assert f"rank 0 of 3 on GPU 0, {where}" in log and f"rank 2 of 3 on GPU 0, {where}" in log
    assert "rank 1 of 3" not in log
    second = (tmp_path / "logs/night/40123-0/node8/rank-1.log").read_text()
    assert second == f"rank 1 of 3 on GPU 0, {where}\n"
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
        names = set(container["container-env"].split(","))
        passed = """RANKS MASTER_ADDR MASTER_PORT CUDA_DEVICE_MAX_CONNECTIONS TRITON_CACHE_DIR PYTHONUNBUFFERED
        PYTORCH_CUDA_ALLOC_CONF NCCL_DEBUG NCCL_IB_HCA GLOO_LEVEL"""
        assert names >= set(passed.split())
        assert not names & {"PATH", "HOME", "SLURM_JOB_ID"}
    allocator = "max_split_size_mb:512" if image else "expandable_segments:True"
    assert (tmp_path / "environment").read_text() == f"{allocator} 1 96\n"
    arguments = (tmp_path / "trainer").read_text().splitlines()
    assert arguments[:3] == ["-m", "wlb_megatron.launch", "/home/user/Megatron-LM/pretrain_gpt.py"]
    assert arguments[-2:] == ["--lr", "1e-4"], "what follows the script's name comes last"
    assert "--exit-signal-handler" in arguments and "#" not in "".join(arguments)
    assert arguments[arguments.index("--wlb-log") + 1] == f"{tmp_path}/logs/night/steps.jsonl"


@pytest.mark.parametrize(
    ("saved", "status", "queued", "message"),
    [
        ("700", 1, True, r"first on node8(.|\n)*failed at iteration 700 of 50000: the job queues itself"),
        ("600", 1, False, "ended with status 1 at iteration 600 of 50000"),  # nothing new since its start
        ("", 9, False, "ended with status 9 at iteration 600 of 50000"),
        ("50000", 1, False, "ended with status 1 at iteration 50000 of 50000"),
        ("700", 0, False, "ended with status 0 at iteration 700 of 50000"),  # --exit-interval and the like
    ],
)
def test_a_run_that_fails_is_queued_again_only_where_it_had_come_further(
    saved, status, queued, message, checkpoints, tmp_path
):
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("600")
    code, log, _ = run_with_stubs(SCRIPT, tmp_path, status, saved)
    assert re.search(message, log), log
    assert code == (0 if queued else status)
    asked = tmp_path / "scontrol"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 40123\n" if queued else "")


@pytest.mark.parametrize(
    ("usable", "excluded", "goes_on_without"),
    [
        ("6 7 8 9", "", "node8"),
        ("7 8 9", "", ""),
        ("6 7 9 8 8", "", "node8"),
        ("5 6 7 8 9", "node5", "node5,node8"),  # by a flag, or since an earlier failure
        ("5 7 8 9", "node5", ""),
    ],
)
def test_a_node_whose_task_failed_is_left_out_where_there_are_others(
    usable, excluded, goes_on_without, checkpoints, tmp_path
):
    _, log, _ = run_with_stubs(SCRIPT, tmp_path, 1, "700", USABLE=usable, EXCLUDED=excluded)
    asked = (tmp_path / "scontrol").read_text().splitlines()
    assert asked[0] == "requeue 40123"
    assert asked[1:] == [f"update JobId=40123 ExcNodeList={goes_on_without}"] * bool(goes_on_without)
    assert (f"goes on without {goes_on_without.replace(',', ' ')}" in log) == bool(goes_on_without)


def test_why_a_run_failed_is_told_in_the_jobs_log_and_a_full_disk_ends_it(checkpoints, tmp_path):
    line = "wlb_megatron: error: cannot save in /full: No space left on device"
    code, log, _ = run_with_stubs(SCRIPT, tmp_path, 1, "700", SAYS=line, SLURM_RESTART_COUNT="1")
    assert code == 1 and f"failed with status 1, first on node8; {line}\n" in log
    assert not (tmp_path / "scontrol").exists()
    assert "ended with status 1 at iteration 700" in log and "starts in a row" not in log
    # At a restart the flags are known to be right: what fails without a new checkpoint is tried again, three times.
    queued = []
    for start in (2, 3, 4, 5):
        code, log, _ = run_with_stubs(SCRIPT, tmp_path, 9, "", SLURM_RESTART_COUNT=str(start))
        queued.append(code)
    assert queued == [0, 0, 9, 1]
    assert "ended after 3 starts in a row without a new checkpoint" in log


def test_a_job_whose_folder_another_running_job_has_does_not_start(checkpoints, tmp_path):
    (checkpoints / "job").write_text("40120\n")
    with pytest.raises(FileNotFoundError):  # srun was not called
        run_with_stubs(SCRIPT, tmp_path, 0, "50000")
    (checkpoints / "job").write_text("40119\n")  # has ended, or was killed
    assert run_with_stubs(SCRIPT, tmp_path, 0, "50000")[0] == 0
    assert (checkpoints / "job").read_text() == "40123\n"


def test_a_job_signalled_three_times_before_it_has_saved_is_not_queued_again(checkpoints, tmp_path):
    asked, queued = tmp_path / "scontrol", []
    for start, saved in enumerate(["", "", "700", "", "", ""]):
        restarts = {"signal": "USR1", "SLURM_RESTART_COUNT": str(start)}
        code, log, _ = run_with_stubs(SCRIPT, tmp_path, 0, saved, **restarts)
        assert "signalled: the trainers save and exit" in log
        queued.append(asked.exists())
        asked.unlink(missing_ok=True)
        assert code == (0 if queued[-1] else 1), (start, log)
    assert queued == [True, True, True, True, True, False], "saving begins the count anew"
    assert "3 starts in a row without a new checkpoint: see why in" in log


def test_a_release_checkpoint_counts_as_iteration_0_and_fsdp_gets_the_connections_that_it_asks_for(
    checkpoints, tmp_path
):
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("release")
    _, log, _ = run_with_stubs(SCRIPT, tmp_path, 1, "")
    assert "from iteration 0," in log and "ended with status 1 at iteration 0 of" in log
    run_with_stubs(SCRIPT, tmp_path, 0, "50000", "--use-megatron-fsdp")
    assert (tmp_path / "environment").read_text().split()[1:] == ["8", "96"]


STANDING_IN = """#!/usr/bin/env bash
# Stands for the trainer: at the first start n2 fails when its job is to go on, after a checkpoint was saved.
if [ -n "${SLURM_RESTART_COUNT:-}" ] || [ -e "$PWD/go" ]; then
    echo 50000 >"$PWD/checkpoints/latest_checkpointed_iteration.txt"
elif [ "$SLURMD_NODENAME" = n2 ]; then
    until [ -e "$PWD/go" ]; do sleep 0.2; done
    echo 700 >"$PWD/checkpoints/latest_checkpointed_iteration.txt"
    exit 7
else
    sleep 100
fi
"""


def test_slurm_goes_on_without_a_node_that_failed_and_keeps_second_jobs_out(tmp_path):
    reason = missing()
    if reason is not None:
        without("slurm", reason)
    trainer = tmp_path / "trainer"
    trainer.write_text(STANDING_IN)
    trainer.chmod(0o755)
    run = f"PYTHON={trainer} IMAGE= TRAIN_ITERS=50000 RESTARTS=3 CHECKPOINTS={tmp_path}/checkpoints\n"
    run += "ENTRY=() MODEL=() LAYOUT=() DATA=() TRAINING=() WLB=()\n"
    script = tmp_path / "pretrain.sbatch"
    script.write_text(EDIT.sub(lambda _: run, SCRIPT.read_text()))
    with cluster(tmp_path, ("n1", "n2", "n3")) as environment:

        def submit(name: str, nodes: int) -> str:
            sized = [f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=0", f"--chdir={tmp_path}"]
            named = [f"--job-name={name}", f"--output={tmp_path}/{name}-%j.log"]
            answer = ask(["sbatch", *sized, *named, str(script)], environment)
            return re.findall(r"Submitted batch job (\d+)", answer)[0]

        def log(name: str, job: str) -> str:
            path = tmp_path / f"{name}-{job}.log"
            return path.read_text() if path.exists() else ""

        first = submit("night", 2)
        wait_for(lambda: "from iteration 0, on n1 n2" in log("night", first), 30)
        second, other = submit("night", 1), submit("other", 1)
        wait_for(lambda: f"job {first} trains in {tmp_path}/checkpoints" in log("other", other), 30)
        assert "Dependency" in ask(["squeue", "-h", "-j", second, "-o", "%T %r"], environment)
        (tmp_path / "go").touch()
        try:
            wait_for(lambda: "ended with status 0" in log("night", first), 150)
            wait_for(lambda: "ended with status 0" in log("night", second), 60)
        except TimeoutError:
            pytest.fail(log("night", first) + ask(["squeue"], environment))
    text = log("night", first)
    assert ", first on n2; see " in text and "goes on without n2" in text
    assert "start 1, from iteration 700, on n1 n3" in text
    assert f"job {second}, start 0, from iteration 50000" in log("night", second), "it waited for the first"


@pytest.fixture()
def slurm(tmp_path):
    reason = missing()
    if reason is not None:
        without("slurm", reason)
    with cluster(tmp_path) as environment:
        yield environment


@pytest.mark.megatron
def test_slurm_goes_on_after_a_requeue_and_in_a_new_job_after_a_full_disk(slurm, corpus, tmp_path):
    """Signalled as at the time limit: both tasks save, the job requeues itself and resumes. Its last save does not fit
    its disk: it ends, and says so last. With more room a new job of its name goes on from the first save."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    sized = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0"]
    environment = {**cpu_environment(), **slurm}
    environment["PYTHONPATH"] = cpu_environment()["PYTHONPATH"]
    script = str(edited(tmp_path, corpus))

    def submit() -> tuple[str, Path]:
        places = [f"--output={tmp_path}/job-%j.log", f"--chdir={tmp_path}"]
        answer = ask(["sbatch", *sized, *places, script], environment)
        submitted = re.search(r"Submitted batch job (\d+)", answer)
        assert submitted, answer
        return submitted[1], tmp_path / f"job-{submitted[1]}.log"

    def wait(log: Path, text: str, seconds: float) -> None:
        try:
            ends = f"{text}|ended with status"
            wait_for(lambda: log.exists() and re.search(ends, log.read_text()), seconds)
        except TimeoutError as error:
            daemons = "".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("slurm*.log")))
            pytest.fail(f"{error}\n{log.read_text()[-6000:] if log.exists() else ''}\n{daemons}")

    with small_disk(checkpoints, kilobytes=5000) as mounted:
        job, log = submit()
        wait(log, r"\[wlb\] iteration 3 ", 120)
        ask(["scancel", "--batch", "--signal=USR1", job], slurm)
        wait(log, "queues itself again", 90)
        if mounted:
            room = shutil.disk_usage(checkpoints).free - (64 << 10)
            (checkpoints / "of_another_user").write_bytes(bytes(room))
        wait(log, "ended with status", 150)
        text = log.read_text()
        assert f"job {job}, start 0, from iteration 0," in text
        stopped = int(re.search(rf"stopped at iteration (\d+) of {STEPS}", text)[1])
        assert 3 <= stopped < STEPS
        assert f"job {job}, start 1, from iteration {stopped}," in text
        trained = [int(number) for number in re.findall(r"\[wlb\] iteration (\d+) ", text)]
        assert trained == list(range(1, STEPS + 1))
        if mounted:
            last = text.strip().splitlines()[-1]
            assert re.search(rf"ended with status (1|143) at iteration {stopped} of {STEPS};", last), last
            full = f"cannot save a checkpoint in {checkpoints}: No space left on device"
            assert f"wlb_megatron: error: {full}" in last
            (checkpoints / "of_another_user").unlink()
            job, log = submit()
            wait(log, "ended with status", 150)
            text = log.read_text()
            assert f"job {job}, start 0, from iteration {stopped}," in text
        assert f"ended with status 0 at iteration {STEPS} of {STEPS}" in text
        assert "Traceback" not in text
