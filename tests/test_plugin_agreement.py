"""Ranks that plan differently are found out, at start and while training."""

from __future__ import annotations

import hashlib
import re
import resource
import time
from collections import Counter

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from megatron_runs import free_port

from wlb_megatron.errors import WlbError
from wlb_megatron.plan import IterationPlan, MicroBatch, Piece
from wlb_megatron.plugin import board
from wlb_megatron.plugin.agreement import PlanAgreement, shared_gpu
from wlb_megatron.plugin.board import KEPT, Board, common_store, wait_for
from wlb_megatron.plugin.open_files import allow_open_files
from wlb_megatron.plugin.planning import update_digest


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def rank_of_three(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    agreement = PlanAgreement()
    agreement.begin("kernel table", "state")
    assert not agreement.started
    agreement.compare(0, digest("same"), wait=True)
    for iteration in range(1, 5):
        agreement.compare(iteration * 100, digest(f"same {iteration}"))
        agreement.check()
        # A late rank holds all others up at the next comparison, so none of its keys goes before it has read them.
        time.sleep(0.05 * rank)
    agreement.check(wait=True)
    dist.barrier()
    kept = [at for at in range(5) if agreement._store.check([f"{at * 100}/answer"])]
    assert kept == [3, 4]
    assert not any(agreement._store.check([f"100/{key}"]) for key in ("all", "digests", "digest 1"))
    assert not agreement._store.check([f"100/{digest('same 1').hex()}"])
    dist.barrier()
    with pytest.raises(RuntimeError) as told:
        agreement.compare(500, digest("other" if rank == 2 else "same"))  # on the last rank to come
        agreement.check(wait=True)
    assert re.search(r"planned iteration 500 differently: .*same everywhere", str(told.value))
    assert re.search(r"2 as rank [01] \(.*1 as rank 2 \(|1 as rank 2 \(.*2 as rank [01] \(", str(told.value))
    again = PlanAgreement()  # a second training in these processes knows nothing of the first
    again.compare(500, digest("same"), wait=True)
    with pytest.raises(RuntimeError, match="ranks would plan differently: "):
        PlanAgreement().begin("kernel table", f"state {rank}")
    dist.barrier()
    # Two uses of a name right after each other (dynamic groups and the solver): a rank may be at its second one
    # before another is at its first.
    if rank:
        time.sleep(0.3)
    first, second = common_store("notes"), common_store("notes")
    for at, store in enumerate((first, second)):
        store.set(f"{rank} wrote", str(at))
    for at, store in enumerate((first, second)):
        assert [store.get(f"{other} wrote") for other in range(3)] == [str(at).encode()] * 3
    dist.barrier()
    board._attempt, board._calls = None, Counter()  # torchrun's store outlives its workers
    assert not common_store("digests").check(["0/all"])
    assert shared_gpu("NVIDIA H200" if rank == 1 else "NVIDIA H100 80GB HBM3") == "NVIDIA H100 80GB HBM3"
    notes = Board()
    for number in range(KEPT + 5 if rank == 0 else 0):
        notes.put(number, b"%d" % number)
    dist.barrier()
    assert notes.take(KEPT, lambda: False) == b"%d" % KEPT
    assert notes.take(5, lambda: False) == b"5"
    with pytest.raises(
        RuntimeError, match=rf"rank {rank} on .* asks for rank 0's plan 4, those before 5 are no"
    ):
        notes.take(4, lambda: False)
    dist.barrier()
    dist.destroy_process_group()


def test_equal_digests_pass_and_one_different_rank_is_named_on_all() -> None:
    multiprocessing.spawn(rank_of_three, (free_port(),), nprocs=3, join=True)


def test_waiting_logs_nothing_however_long_and_ends_when_given_up_or_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """torch logs two lines whenever a wait's time is over: thousands a second, where thousands of ranks wait."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begin = time.monotonic()
    assert not wait_for(store, "note", lambda: time.monotonic() > begin + 1.2)
    assert 1.2 < time.monotonic() - begin < 10
    store.set("note", "here")
    assert wait_for(store, "note", lambda: False)
    assert "".join(capfd.readouterr()) == ""


def limits_of_many_ranks() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 8192))
    allow_open_files(100, "plans")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1124, 8192)
    allow_open_files(7500, "indices")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (8192, 8192)
    with pytest.raises(
        WlbError, match=r"batches need 400 open files, 8256 with all others, .* may open 8192"
    ):
        allow_open_files(400, "batches")


def test_a_process_is_let_open_a_connection_to_every_rank_or_the_limit_is_named() -> None:
    process = multiprocessing.get_context("spawn").Process(target=limits_of_many_ranks)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_plans_that_differ_in_a_prefix_alone_have_other_digests() -> None:
    found = set()
    for prefix in (0, 4):
        head, tail = (MicroBatch((piece,), 1) for piece in (Piece(0, 7, 0, 4), Piece(0, 7, 4, 8, prefix)))
        told = hashlib.blake2b(digest_size=8)
        update_digest(told, IterationPlan(0, (), ((head,), (tail,)), ()))
        found.add(told.digest())
    assert len(found) == 2
