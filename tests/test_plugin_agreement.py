"""Ranks that plan differently are found out, at start and while training."""

import hashlib
import math
import os
import re
import resource
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import spawn
from megatron_runs import free_port
from packing_oracle import make_planner

from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.plan import IterationPlan, MicroBatch, Piece
from wlb_megatron.plugin import stores
from wlb_megatron.plugin.flags.data_paths import allow_open_files
from wlb_megatron.plugin.job_state import begin_job
from wlb_megatron.plugin.micro_batches.iterators import MicroBatchIterator, MicroBatchSampler
from wlb_megatron.plugin.micro_batches.planning import (
    PlannedIteration,
    ShardSettings,
    plan_iterations,
    update_digest,
)
from wlb_megatron.plugin.plans.agreement import EVERY, PlanAgreement, shared_gpu
from wlb_megatron.plugin.stores import KEPT, PlanStore, common_store, wait_for
from wlb_megatron.refusals import RefusedHere
from wlb_megatron.sharding.cut import digest_of_cuts
from wlb_megatron.sharding.segments import Chunks, ShardPlan
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.kernel_table import h100


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
    for key in ("all", 0, 1, 2):
        assert not agreement._store.check([f"100/{key}"])
    dist.barrier()
    with pytest.raises(RuntimeError) as error:
        agreement.compare(500, digest("other" if rank == 2 else "same"))  # on the last rank to come
        agreement.check(wait=True)
    assert re.search(r"planned iteration 500 differently: .*same everywhere", str(error.value))
    assert re.search(r"2 as rank [01] \(.*1 as rank 2 \(|1 as rank 2 \(.*2 as rank [01] \(", str(error.value))
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
    begin_job()  # torchrun's store outlives its workers
    assert not common_store("digests").check(["0/all"])
    assert shared_gpu("NVIDIA H200" if rank == 1 else "NVIDIA H100 80GB HBM3") == "NVIDIA H100 80GB HBM3"
    notes = PlanStore()
    for number in range(KEPT + 5 if rank == 0 else 0):
        notes.leave(number, partial(bytes, b"%d" % number))
    dist.barrier()
    assert notes.take(KEPT, lambda: False) == b"%d" % KEPT
    assert notes.take(5, lambda: False) == b"5"
    assert notes.take(4, lambda: True) is None  # gone: no rank is so far behind
    dist.barrier()
    dist.destroy_process_group()


def test_equal_digests_pass_and_one_different_rank_is_named_on_all():
    spawn(rank_of_three, (free_port(),), 3)


def plans(dp_rank: int, differs_from: float) -> Iterator[PlannedIteration]:
    """The documents are the same; from this iteration on they are cut in another way."""
    plans_of_ranks = []
    for sharding in ("per-document", "per-sequence"):
        stream = DocumentStream.of_lengths([60, 7, 200, 31, 90], Rules(256, "split", 1, endless=True))
        job = {"window": 256, "micro_batches": 2, "dp": 2, "micro_batches_per_window": "auto"}
        planner = make_planner(stream, cost=CostModel(100.0), **job)
        plans_of_ranks.append(plan_iterations(planner, ShardSettings(dp_rank, 2, 2, sharding, h100())))
    for ours, others in zip(*plans_of_ranks, strict=True):
        assert ours.digest == others.digest
        yield others if ours.micro_batches[0].iteration >= differs_from else ours


def rank_of_four(rank: int, port: int) -> None:
    """Two data-parallel ranks of two context-parallel ranks each, of which rank 3 cuts differently: never, from the
    start, or from iteration 100 on."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    for differs in (math.inf, 0, EVERY):
        agreement = PlanAgreement()
        agreement.begin("state")
        see = partial(agreement.see, dp_rank=rank // 2)
        planned = plans(rank // 2, differs if rank == 3 else math.inf)
        iteration, micro_batches, message = -1, iter(MicroBatchSampler(planned, see)), ""
        try:
            while iteration < EVERY + 1:
                iteration = next(micro_batches)[0].iteration
                agreement.check()
            agreement.check(wait=True)
        except RuntimeError as error:
            message = str(error)
        dist.barrier()
        if differs == math.inf:
            assert message == ""
            continue
        assert re.fullmatch(
            rf"wlb_megatron: ranks have cut iteration {differs} differently: "
            r"1 as rank [23] \(.*\); 1 as rank [23] \(.*\): the documents are the same, .*",
            message,
        )
        assert iteration == -1 if not differs else iteration >= EVERY - 1
    dist.destroy_process_group()


def test_a_rank_that_cuts_micro_batches_differently_is_named_before_the_first_of_them_is_given_out():
    spawn(rank_of_four, (free_port(),), 4)


def test_digests_tell_segments_order_number_of_calls_and_prefixes_apart():
    rows = np.array([[0, 0, 4], [1, 0, 2]]), np.array([[1, 2, 8]])
    lengths = np.array([4, 8])
    cached = np.array([[0, 0, 4, 0, 1, 4]])
    cuts = [
        ShardPlan(lengths, rows),
        ShardPlan(lengths, rows[::-1]),
        ShardPlan(lengths, (rows[0][::-1], rows[1])),
        ShardPlan(lengths, (rows[0][:1], np.concatenate((rows[0][1:], rows[1])))),
        ShardPlan(lengths, rows, one_call=True),
        ShardPlan(lengths, rows, chunks=Chunks(1, np.array([4, 0]), (cached, cached[:0]), np.array([0, 1]))),
        ShardPlan(lengths, rows, chunks=Chunks(1, np.array([4, 0]), (cached[:0], cached), np.array([0, 1]))),
    ]
    assert len({digest_of_cuts([cut]) for cut in cuts}) == len(cuts)
    copied = ShardPlan(lengths.copy(), (rows[0].copy(), rows[1]), kind="x")
    assert digest_of_cuts(cuts[:1]) == digest_of_cuts([copied])
    digests = set()
    for prefix in (0, 4):
        head, tail = (MicroBatch((piece,), 1) for piece in (Piece(0, 7, 0, 4), Piece(0, 7, 4, 8, prefix)))
        state = hashlib.blake2b(digest_size=8)
        update_digest(state, IterationPlan(0, (), ((head,), (tail,)), ()))
        digests.add(state.digest())
    assert len(digests) == 2


def test_waiting_logs_nothing_however_long_and_ends_when_given_up_or_told(capfd):
    """torch logs two lines whenever a wait's time is over: thousands a second, where thousands of ranks wait."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begin = time.monotonic()
    assert not wait_for(store, "note", lambda: time.monotonic() > begin + 1.2)
    assert 1.2 < time.monotonic() - begin < 10
    store.set("note", "here")
    assert wait_for(store, "note", lambda: False)
    assert "".join(capfd.readouterr()) == ""


def limits_of_many_ranks(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 8192))
    allow_open_files(100, "plans")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1124, 8192)
    allow_open_files(7500, "indices")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (8192, 8192)
    needed = r"batches need 400 open files, 8256 with all others, .* may open 8192"
    with pytest.raises(WlbError, match=needed):
        allow_open_files(400, "batches")


def test_a_process_is_let_open_a_connection_to_every_rank_or_the_limit_is_named():
    spawn(limits_of_many_ranks, (), 1)


# A rank that cannot go on tells the others, which would end with a stack of a lost connection.


class Loader:
    """Whose draw fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self):
        return self

    def __next__(self):
        raise self.error


def failing_of_two(rank: int, port: int, out: Path, failing: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    stores.share_failures()
    if rank == failing:
        with pytest.raises(RefusedHere, match=r"^wlb_megatron: error: the disk is gone$"):
            next(MicroBatchIterator(Loader(WlbError("the disk is gone"))))
        os._exit(0)
    with pytest.raises(RefusedHere) as refused:
        stores.with_others_lines(lambda: dist.all_reduce(torch.ones(1)))
    (out / "line").write_text(str(refused.value))
    os._exit(0)


@pytest.mark.parametrize(
    ("failing", "line"),
    [
        (1, r"^wlb_megatron: error: rank 1 on \S+ has ended: the disk is gone$"),
        (0, r"^wlb_megatron: error: the process that serves torch's store has ended \(rank 0, "),
    ],
)
def test_the_other_ranks_end_with_the_line_of_the_one_that_failed(failing, line, tmp_path):
    spawn(failing_of_two, (free_port(), tmp_path, failing), 2)
    assert re.search(line, (tmp_path / "line").read_text())


def an_own_error(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=1)
    stores.share_failures()

    def fails() -> None:
        raise RuntimeError("an error of its own")

    with pytest.raises(RuntimeError, match="an error of its own"):
        stores.with_others_lines(fails)


def test_a_ranks_own_error_keeps_its_stack():
    spawn(an_own_error, (free_port(),), 1)
