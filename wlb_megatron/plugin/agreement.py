"""Every rank must have made the same plan: digests are compared at start, and now and then beside training."""

from __future__ import annotations

import resource
from typing import Any

import torch
import torch.distributed as dist

EVERY = 100
"""Iterations between comparisons."""


class PlanAgreement:
    """Compares the plans' digests over a gloo group; the answer is looked at one comparison later or when it is in."""

    def __init__(self) -> None:
        allow_open_files(dist.get_world_size())
        self.group: Any = dist.new_group(backend="gloo")
        self._pending: tuple[int, torch.Tensor, Any] | None = None
        self.started = False

    def compare(self, iteration: int, digest: bytes, *, wait: bool = False) -> None:
        """Start a comparison (all ranks, same iteration). RuntimeError if an earlier one found a difference."""
        self.check(wait=True)
        self.started = True
        # Smallest and largest at once: the maximum of x and of -x. 62 bits, so that -x exists.
        value = int.from_bytes(digest, "little") >> 2
        both = torch.tensor([value, -value], dtype=torch.int64, device="cpu")
        work = dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._pending = (iteration, both, work)
        self.check(wait=wait)

    def check(self, *, wait: bool = False) -> None:
        """Look at the pending comparison, if it is done (or wait for it)."""
        if self._pending is None:
            return
        iteration, both, work = self._pending
        if not wait and not work.is_completed():
            return
        work.wait()
        self._pending = None
        largest, smallest = int(both[0]), -int(both[1])
        if largest != smallest:
            raise RuntimeError(
                f"wlb_megatron: ranks have planned iteration {iteration} differently: the corpus, its index, the "
                "--wlb flags, a profile or the GPUs' memory (it decides Lmax: set --wlb-max-tokens) "
                "differ between nodes; make them the same everywhere"
            )


def allow_open_files(ranks: int) -> None:
    """Let this process open a connection to each rank in two gloo groups, beside what training opens: a process is
    often allowed 1,024 files until it asks for more. RuntimeError where the machine does not allow one group."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < ranks + 256:
        raise RuntimeError(
            f"wlb_megatron: gloo connects each of {ranks} ranks with all others, but a process may open {most} files "
            "here: raise the hard limit (ulimit -Hn, Slurm's PropagateResourceLimits, the container's --ulimit nofile)"
        )
    wanted = 2 * ranks + 1024
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        within = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (within, most))
