"""Ranks that plan differently are found out, at start and while training."""

from __future__ import annotations

import hashlib
import os
import resource
import time

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from megatron_runs import free_port

from wlb_megatron.plugin.agreement import PlanAgreement
from wlb_megatron.plugin.board import common_store, wait_for
from wlb_megatron.plugin.open_files import allow_open_files


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def rank_of_three(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    agreement = PlanAgreement()
    agreement.compare(0, digest("same"), wait=True)
    for iteration in range(1, 5):
        agreement.compare(iteration * 100, digest(f"same {iteration}"))
        agreement.check()
    agreement.check(wait=True)
    with pytest.raises(RuntimeError, match=r"planned iteration 500 differently.*same everywhere"):
        agreement.compare(500, digest("other" if rank == 2 else "same"))  # on the last rank to come
        agreement.check(wait=True)
    again = PlanAgreement()  # a second training in these processes knows nothing of the first
    again.compare(500, digest("same"), wait=True)
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
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # torchrun's store outlives its workers
    assert not common_store("digests").check(["0/all"])
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
    allow_open_files(100)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1124, 8192)
    allow_open_files(7500)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (8192, 8192)
    with pytest.raises(RuntimeError, match=r"16384 ranks.* may open 8192 files"):
        allow_open_files(16384)


def test_a_process_is_let_open_a_connection_to_every_rank_or_the_limit_is_named() -> None:
    process = multiprocessing.get_context("spawn").Process(target=limits_of_many_ranks)
    process.start()
    process.join()
    assert process.exitcode == 0
