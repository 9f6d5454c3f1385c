"""fixed-solver in a run of many ranks: rank 0 asks the solver, all others take its answer from a board.

So its CPU time is spent once and not on every rank, and ranks whose solvers differ (another release of ortools on a
node) train by one plan all the same. Everything around the answer is planned alike everywhere. Rank 0 still
solves with one worker and in deterministic time: a resumed run then plans as the uninterrupted one would have.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from wlb_megatron.packing.fixed.solver import FixedSolverPacker, Solution, solve
from wlb_megatron.plugin.plans.planning import PlanAhead
from wlb_megatron.plugin.ranks.board import Board


class Closing(Exception):
    """The run ends while a plan is made; nobody asks for it any more."""


class SharedSolver:
    """packing.fixed.solver.solve, asked on all ranks for the same cases in the same order."""

    def __init__(self, board: Board, closing: Callable[[], bool]) -> None:
        self._board, self._closing = board, closing
        self._asked = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Solution | None:
        number, self._asked = self._asked, self._asked + 1
        if self._closing():
            raise Closing
        if dist.get_rank() == 0:
            return _decode(self._board.leave(number, lambda: _encode(solve(*args, **kwargs))))
        note = self._board.take(number, self._closing)
        if note is None:
            raise Closing
        return _decode(note)


def share_solver(packer: Any, ahead: PlanAhead) -> None:
    """Let a fixed-solver packer, whose plans `ahead` makes, take rank 0's answers. Called on all ranks at once."""
    if isinstance(packer, FixedSolverPacker) and dist.get_world_size() > 1:
        packer.solve = SharedSolver(Board(), lambda: ahead.closing)
        atexit.register(ahead.close)  # a thread that waits for a note must not outlive the interpreter


def _encode(found: Solution | None) -> bytes:
    if found is None:
        return b""
    return np.array([found.objective, found.bound, *found.bin_of], dtype=np.int64).tobytes()


def _decode(note: bytes) -> Solution | None:
    if not note:
        return None
    objective, bound, *bin_of = np.frombuffer(note, dtype=np.int64).tolist()
    return Solution(bin_of, objective, bound)
