"""Every rank must have made the same plan: digests are compared at start, and now and then beside training."""

from __future__ import annotations

import time

import torch.distributed as dist

from wlb_megatron.plugin.board import common_store, wait_for

EVERY = 100
"""Iterations between comparisons."""

_PATIENCE = 1800.0
"""Seconds that ranks may be apart at a comparison that is waited for."""


class PlanAgreement:
    """Compares the plans' digests; the answer is looked at one comparison later or when it is in.

    Ranks count themselves in torch's own store under the digest that they have, and the last one says whether all
    counted there: two short requests of a rank, no connection beyond the one that it has, no group of all ranks.
    """

    def __init__(self) -> None:
        self._ranks = dist.get_world_size()
        self._store = common_store("digests")
        self._pending: int | None = None
        self.started = False

    def compare(self, iteration: int, digest: bytes, *, wait: bool = False) -> None:
        """Start a comparison (all ranks, same iteration). RuntimeError if an earlier one found a difference."""
        self.check(wait=True)
        self.started = True
        same, all_ranks = f"{iteration}/{digest.hex()}", f"{iteration}/all"
        self._store.add(same, 1)
        if self._store.add(all_ranks, 1) == self._ranks:
            # Every rank has counted itself under its digest before it counted here.
            agreed = self._store.add(same, 0) == self._ranks
            self._store.set(f"{iteration}/answer", "agreed" if agreed else "differ")
        self._pending = iteration
        self.check(wait=wait)

    def check(self, *, wait: bool = False) -> None:
        """Look at the pending comparison, if it is done (or wait for it)."""
        if self._pending is None:
            return
        answer = f"{self._pending}/answer"
        if wait:
            until = time.monotonic() + _PATIENCE
            if not wait_for(self._store, answer, lambda: time.monotonic() > until):
                raise RuntimeError(
                    f"wlb_megatron: not every rank has planned iteration {self._pending} within {_PATIENCE:.0f} s of "
                    "this one: see the log of the rank that stopped"
                )
        elif not self._store.check([answer]):
            return
        iteration, self._pending = self._pending, None
        if self._store.get(answer) != b"agreed":
            raise RuntimeError(
                f"wlb_megatron: ranks have planned iteration {iteration} differently: the corpus, its index, the "
                "--wlb flags, a profile or the GPUs' memory (it decides Lmax: set --wlb-max-tokens) "
                "differ between nodes; make them the same everywhere"
            )
