"""How many files a process may open."""

from __future__ import annotations

import resource


def allow_open_files(ranks: int) -> None:
    """Let this process hold a connection of each rank beside what training opens: a process is often allowed 1,024
    files until it asks for more. RuntimeError where the machine does not allow them."""
    wanted = ranks + 1024
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < ranks + 256:
        raise RuntimeError(
            f"wlb_megatron: rank 0 sends plans to {ranks} ranks, but a process may open {most} files here: raise the "
            "hard limit (ulimit -Hn, Slurm's PropagateResourceLimits, the container's --ulimit nofile)"
        )
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        within = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (within, most))
