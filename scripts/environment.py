"""The environment in which Megatron's loop runs without a GPU, for child processes."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def cpu_environment() -> dict[str, str]:
    """This process's environment with the CUDA shim, the package and stand-ins for packages that need a GPU on
    PYTHONPATH, one thread a process."""
    own = [str(ROOT / "wlb_megatron" / "cpu"), str(ROOT), str(ROOT / "tests" / "stand_ins")]
    paths = [*own, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "NO_VCS_VERSION": "1",
        # Scores come and go in large blocks: keep them in the heap, where pages are not handed back and faulted in
        # again each time (half the time of a step).
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
        "MALLOC_TOP_PAD_": str(1 << 28),
    }


def free_port() -> int:
    """A TCP port that was free a moment ago.

    Below those the kernel hands out (32768 up, by default), so that no connection takes it before it is listened on,
    and drawn at random, so that of many runs begun at once no two take the same.
    """
    draw = random.SystemRandom()
    for _ in range(1000):
        with socket.socket() as probe:
            port = draw.randrange(10240, 32768)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free TCP port between 10240 and 32768")
