"""How many files a process may open."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.job_state import part

SPARE, LEAST_SPARE = 1024, 256
"""Files for all that is not counted here (torch, NCCL, checkpoints): asked for, and needed at least."""


@dataclass(slots=True)
class FilesAllowed:
    """counted: of all purposes so far."""

    counted: int = 0


def allow_open_files(more: int, purpose: str) -> None:
    """Let this process open `more` files beside those of earlier calls: often 1,024 are allowed until it asks for more.

    purpose: what opens them, to begin the message. WlbError where the machine's hard limit is too low.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = part(FilesAllowed)
    counted = files.counted + more
    if most != resource.RLIM_INFINITY and most < counted + LEAST_SPARE:
        raise WlbError(
            f"{purpose} need {more} open files, {counted + LEAST_SPARE} with all others, but a process may open {most} "
            "here: raise the hard limit (ulimit -Hn, Slurm's PropagateResourceLimits, the container's --ulimit nofile)"
        )
    files.counted = counted
    wanted = counted + SPARE
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        within = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (within, most))
