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
    """Files counted for all purposes so far."""

    total: int = 0


def allow_open_files(count: int, purpose: str) -> None:
    """Let this process open `count` files beside those of earlier calls. Often 1,024 are allowed until it asks.

    purpose: the opener's name, to begin the message. Raises WlbError if the machine's hard limit is too low.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = part(FilesAllowed)
    total = files.total + count
    if hard_limit != resource.RLIM_INFINITY and hard_limit < total + LEAST_SPARE:
        raise WlbError(
            f"{purpose} need {count} open files, {total + LEAST_SPARE} with all others, but a process may open "
            f"{hard_limit} here: raise the hard limit (ulimit -Hn, Slurm's PropagateResourceLimits, the container's "
            "--ulimit nofile)"
        )
    files.total = total
    target = total + SPARE
    if soft_limit != resource.RLIM_INFINITY and soft_limit < target:
        new_limit = target if hard_limit == resource.RLIM_INFINITY else min(target, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard_limit))
