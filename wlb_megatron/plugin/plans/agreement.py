"""Every rank must have made the same plan: digests are compared at start, and now and then beside training."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache

import torch
import torch.distributed as dist

from wlb_megatron.plugin.micro_batches.planning import PlannedIteration
from wlb_megatron.plugin.stores import common_store, wait_for
from wlb_megatron.sharding.cut import digest_of_cuts

EVERY = 100
"""Iterations between comparisons."""

_BEGIN = -1
"""Stands for an iteration before the first one."""

NAMED_VARIANTS = 4
"""The most digests whose ranks a message names, where digests differ."""

_PATIENCE = 1800.0
"""Seconds that ranks may be apart at a comparison that is waited for."""


_PLANS = "plans"
"""What all ranks compare; ranks that share micro-batches compare their cuts, too."""

_DIFFERS = (
    "the corpus, its index (--sft: a node's own jsonl, tokenizer, template or transformers), the --wlb flags, a "
    "profile or the GPUs' memory (it decides Lmax: set --wlb-max-tokens) differ between nodes; make them the same "
    "everywhere"
)
_CUT_DIFFERS = (
    "the documents are the same, their cut over context-parallel ranks is not: the kernel times planned by, this "
    "plugin or numpy differ between nodes; make them the same everywhere"
)


class PlanAgreement:
    """Compares the plans' digests; the answer is looked at one comparison later or when it is in.

    Each rank leaves its digests in torch's own store and counts itself there. The last one reads them all and leaves
    the answer: a few short requests of a rank, no connection beyond the one that it has, no group of all ranks.
    """

    def __init__(self) -> None:
        self._ranks = dist.get_world_size()
        self._store = common_store("digests")
        self._pending: int | None = None
        self._compared: list[int] = []  # whose keys are in the store
        self.started = False

    def begin(self, *decisive: str) -> None:
        """Compare what decides all plans to come, before a step is run: in one, ranks that differ would wait for each
        other's tensors, or take tensors of another size."""
        self.compare(_BEGIN, hashlib.blake2b("\n".join(decisive).encode(), digest_size=8).digest(), wait=True)
        self.started = False

    def see(self, planned_iteration: PlannedIteration, dp_rank: int) -> None:
        """Compare a planned iteration, if it is due, before any of it trains: ranks that cut a micro-batch differently
        would wait in its exchange for ever. The first one is waited for. dp_rank: data-parallel rank, whose
        micro-batches are cut alike on all ranks that have it."""
        micro_batches = planned_iteration.micro_batches
        iteration, group = micro_batches[0].iteration, micro_batches[0].group
        first = not self.started
        if not first and iteration % EVERY:
            return
        # Dynamic groups change with each micro-batch: the first one's stands for all.
        shared = f"cuts of {dp_rank}" if group is None else f"cuts from rank {group.start}"
        shards = [micro_batch.shard for micro_batch in micro_batches[: None if group is None else 1]]
        self.compare(iteration, planned_iteration.digest, {shared: digest_of_cuts(shards)}, wait=first)

    def compare(
        self, iteration: int, digest: bytes, shared: Mapping[str, bytes] | None = None, *, wait: bool = False
    ) -> None:
        """Start a comparison (all ranks, same iteration). RuntimeError if an earlier one found a difference.

        digest: the same on all ranks. shared: the same on all ranks that name it."""
        self.check(wait=True)
        self._clear()
        self.started = True
        digests = {what: mine.hex() for what, mine in {_PLANS: digest, **(shared or {})}.items()}
        self._store.set(f"{iteration}/{dist.get_rank()}", json.dumps([_who(), digests]))
        if self._store.add(f"{iteration}/all", 1) == self._ranks:
            # Every rank has left its digests before it counted here.
            self._store.set(f"{iteration}/answer", self._answer(iteration))
        self._pending = iteration
        self._compared.append(iteration)
        self.check(wait=wait)

    def check(self, *, wait: bool = False) -> None:
        """Look at the pending comparison, if it is done (or wait for it)."""
        if self._pending is None:
            return
        answer = f"{self._pending}/answer"
        if wait:
            deadline = time.monotonic() + _PATIENCE
            if not wait_for(self._store, answer, lambda: time.monotonic() > deadline):
                event = "begun" if self._pending == _BEGIN else f"planned iteration {self._pending}"
                raise RuntimeError(
                    f"wlb_megatron: not every rank has {event} within {_PATIENCE:.0f} s of this one: see the log of "
                    "the rank that stopped"
                )
        elif not self._store.check([answer]):
            return
        self._pending = None
        verdict = self._store.get(answer).decode()
        if verdict != "agreed":
            raise RuntimeError(f"wlb_megatron: ranks {verdict}")

    def _clear(self) -> None:
        """Take the keys of the comparison before the last one out of the store. Every rank has read its answer: it
        counted itself in the last one only then, and all have counted there, or that had no answer."""
        if len(self._compared) > 1:
            iteration, rank = self._compared.pop(0), dist.get_rank()
            for key in (rank, "all", "answer") if rank == 0 else (rank,):
                self._store.delete_key(f"{iteration}/{key}")

    def _answer(self, iteration: int) -> str:
        """ "agreed", or who differs, and what to do about it."""
        variants: dict[str, dict[str, list[str]]] = {}  # ranks by what they share, plans first, and digest
        for row in self._store.multi_get([f"{iteration}/{rank}" for rank in range(self._ranks)]):
            who, digests = json.loads(row)
            for what, digest in digests.items():
                variants.setdefault(what, {}).setdefault(digest, []).append(who)
        for what, ranks in variants.items():
            if len(ranks) == 1:
                continue
            named = [f"{len(same)} as {same[0]}" for same in [*ranks.values()][:NAMED_VARIANTS]]
            further = len(ranks) - len(named)
            apart = "; ".join(named) + (f", and {further} other variants" if further else "")
            if what != _PLANS:
                return f"have cut iteration {iteration} differently: {apart}: {_CUT_DIFFERS}"
            done = "would plan" if iteration == _BEGIN else f"have planned iteration {iteration}"
            return f"{done} differently: {apart}: {_DIFFERS}"
        return "agreed"


def _who() -> str:
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"rank {dist.get_rank()} ({socket.gethostname()}{gpu})"


@cache
def shared_gpu(name: str) -> str:
    """The name of the GPU by whose kernel times all ranks plan: theirs, or in a job that mixes GPUs the first in the
    alphabet, which is printed. Called on all ranks at once.

    name: this rank's GPU.
    """
    names = [name] * dist.get_world_size()
    dist.all_gather_object(names, name)
    ranks = Counter(names)
    common_gpu = min(ranks)
    if len(ranks) > 1 and dist.get_rank() == 0:
        counts = ", ".join(
            f"{ranks[gpu]} {gpu} (the first is rank {names.index(gpu)})" for gpu in sorted(ranks)
        )
        print(
            f"> wlb_megatron: this job mixes GPUs: {counts}; all plan with the kernel times of {common_gpu}",
            flush=True,
        )
    return common_gpu
