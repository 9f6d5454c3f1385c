"""fixed-solver over processes: one of them solves, all train by its answers, and nobody is left waiting."""

from __future__ import annotations

import time
from itertools import islice
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from forked_ranks import spawn
from megatron_runs import free_port

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plugin.plans.planning import PlanAhead, ShardSettings, plan_iterations
from wlb_megatron.plugin.ranks import shared_solver
from wlb_megatron.plugin.ranks.board import Board
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.kernel_table import h100

LENGTHS = [60, 37, 2, 15, 60, 3, 33, 9, 22, 41, 5, 8, 28]
ITERATIONS = 6


def planner() -> Planner:
    stream = DocumentStream.of_lengths(LENGTHS, Rules(64, "split", 1, endless=True))
    config = WlbConfig(packing="fixed-solver", balance_batches=2, solver_seconds=0.05)
    packer = make_packer(config, CostModel(20.0), window=64, micro_batches=1, dp=2)
    return Planner(stream, packer, global_tokens=2 * 64)


def rank_of_two(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    settings = ShardSettings(dp_rank=rank, cp_size=1, alignment=1, sharding="hybrid", table=h100())
    alone = list(islice(plan_iterations(planner(), settings), ITERATIONS))
    shared = planner()
    if rank == 1:
        shared_solver.solve = never
    ahead = PlanAhead(lambda: plan_iterations(shared, settings), depth=2)
    shared_solver.share_solver(shared.packer, ahead)
    planned = list(islice(ahead, ITERATIONS))
    assert [one.digest for one in planned] == [one.digest for one in alone]
    assert [one.state() for one in planned] == [one.state() for one in alone]
    dist.barrier()
    ahead.close()
    # Another answer on rank 0, as another release of the solver might give, is everybody's answer.
    if rank == 0:
        shared_solver.solve = lambda *args, **kwargs: None
    other = planner()
    other.packer.solve = shared_solver.SharedSolver(Board(), lambda: False)  # type: ignore[attr-defined]
    mine = [one.digest for one in islice(plan_iterations(other, settings), ITERATIONS)]
    theirs: list[list[bytes] | None] = [None, None]
    dist.all_gather_object(theirs, mine)
    assert theirs[0] == theirs[1] != [one.digest for one in alone]
    # Rank 0 makes no more plans: one that waits for it ends when its run does.
    board, begin = Board(), time.monotonic()
    if rank == 1:
        with pytest.raises(shared_solver.Closing):
            shared_solver.SharedSolver(board, lambda: time.monotonic() > begin + 1)()
        assert time.monotonic() < begin + 20
    dist.barrier()
    dist.destroy_process_group()


def never(*_: object, **__: object) -> None:
    raise AssertionError("this rank must not solve")


def test_two_processes_train_by_the_answers_of_one_solver() -> None:
    pytest.importorskip("ortools")
    spawn(rank_of_two, (free_port(),), 2)


def test_other_packers_and_single_processes_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_solver, "Board", lambda: pytest.fail("a board for nothing"))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    packer = planner().packer
    shared_solver.share_solver(packer, SimpleNamespace(closing=False))  # type: ignore[arg-type]
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    other = make_packer(WlbConfig(), CostModel(20.0), window=64, micro_batches=2)
    shared_solver.share_solver(other, SimpleNamespace(closing=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "found", [None, shared_solver.Solution([], 0, 0), shared_solver.Solution([1, -1], 2**61, 7)]
)
def test_an_answer_comes_back_as_it_was_sent(found: shared_solver.Solution | None) -> None:
    assert shared_solver._decode(shared_solver._encode(found)) == found
