"""A real Slurm of this user in a temporary folder: munged, slurmctld, and a slurmd for each node, on free ports."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_runs import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
# A job requeued starts again after cred_expire (seconds), so that no old credential of it is left.
CONFIGURATION = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=2
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000"


def missing() -> str | None:
    """Why no Slurm can be started here, or None."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)} here (Debian: apt-get install slurm-wlm munge)"
    if os.getuid() != 0:
        return "slurmd wants to be root"
    return None


def _path() -> str:
    return os.environ["PATH"] + os.pathsep + "/usr/sbin"


@contextmanager
def cluster(folder: Path, names: tuple[str, ...] = ()) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and its like talk to a cluster that lives as long as the block.

    names: of its nodes; none: one node with this machine's name.
    """
    host = socket.gethostname().split(".")[0]
    names = names or (host,)
    for name in ("munge", "state", *(f"spool-{node}" for node in names)):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    nodes = "\n".join(NODE.format(name=name, host=host, port=free_port()) for name in names)
    places = {"host": host, "user": "root", "folder": folder, "controller": free_port()}
    configuration.write_text(CONFIGURATION.format(nodes=nodes, **places))
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(configuration)}
    munge = [f"--{name}-file={folder / 'munge' / name}" for name in ("pid", "log", "seed")]
    munge += [f"--key-file={key}", f"--socket={folder / 'munge' / 'socket'}"]
    daemons = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-f", str(configuration)],
        *(["slurmd", "-D", "-N", name, "-f", str(configuration)] for name in names),
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for daemon in daemons:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(subprocess.Popen(daemon, env=environment, **quiet))
            time.sleep(0.5)
        states, idle = ["sinfo", "-h", "-N", "-o", "%t"], ["idle"] * len(names)
        wait_for(lambda: ask(states, environment).split() == idle, 60)
        yield environment
    finally:
        with suppress(subprocess.TimeoutExpired, TimeoutError):
            ask(["scancel", "--user=root"], environment)
            wait_for(lambda: not ask(["squeue", "-h"], environment).strip(), 30)
        for process in reversed(started):
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def ask(command: list[str], environment: dict[str, str]) -> str:
    """What a Slurm command printed, errors included."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


def wait_for(happened: object, seconds: float) -> None:
    """Until `happened()` is true; TimeoutError after that many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.3)
