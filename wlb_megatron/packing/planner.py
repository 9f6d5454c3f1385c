"""From a stream of documents to one plan an iteration: intake, release, drain."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from wlb_megatron.errors import WlbError
from wlb_megatron.packing.packer import Packer
from wlb_megatron.plan import IterationPlan, Piece

STATE_VERSION = 1


class Stream(Protocol):
    """Pieces in the order in which they arrive: whole documents, over-long ones already split, none empty."""

    def next(self) -> Piece | None:
        """The next piece, or None at the end of a finite stream (and ever after)."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class Planner:
    """Yields an IterationPlan a call.

    Intake: iteration k takes pieces until the running total reaches (k + 1) x global_tokens; the piece that
    crosses is taken. A packer that balances K global batches gets K iterations' pieces in each K-th iteration.
    With 10 global tokens and pieces of 4 tokens: iteration 0 takes 3 (total 12), iteration 1 takes 2 (20).
    Pieces that a packer puts back are taken again first, and count again: the stream then runs that much slower,
    and `put_back` counts them.
    A finite stream is drained: iterations go on until nothing waits.
    """

    def __init__(self, stream: Stream, packer: Packer, *, global_tokens: int) -> None:
        """global_tokens: micro-batches x data-parallel size x window."""
        if global_tokens < 1:
            raise WlbError(f"a global batch must hold at least one token, got {global_tokens}")
        self.stream = stream
        self.packer = packer
        self.global_tokens = global_tokens
        self.iteration = 0
        self.taken = 0  # tokens; a Python integer, so it does not end at 2**31
        self.put_back = 0  # pieces, so far
        self._put_back: deque[Piece] = deque()
        self._ended = False

    def next_iteration(self) -> IterationPlan | None:
        """The next iteration's plan, or None when a finite stream has ended and nothing waits."""
        arrived = self._take_in()
        if self._ended and not arrived and not self.packer.waiting:
            return None
        grid, put_back = self.packer.pack(self.iteration, arrived, self._ended)
        if put_back:
            refused = frozenset(put_back)
            arrived = [piece for piece in arrived if piece not in refused]
            self._put_back.extendleft(reversed(put_back))
            self.put_back += len(put_back)
        plan = IterationPlan(self.iteration, tuple(arrived), grid, self.packer.waiting)
        self.iteration += 1
        return plan

    def _take_in(self) -> list[Piece]:
        batches = self.packer.intake_batches
        if self.iteration % batches:
            return []
        goal = (self.iteration + batches) * self.global_tokens
        arrived: list[Piece] = []
        while self.taken < goal:
            piece = self._put_back.popleft() if self._put_back else self.stream.next()
            if piece is None:
                self._ended = True
                break
            arrived.append(piece)
            self.taken += piece.end - piece.start
        return arrived

    def state(self) -> dict[str, Any]:
        """JSON-able; belongs to the iterations yielded so far."""
        return {
            "version": STATE_VERSION,
            "iteration": self.iteration,
            "taken": self.taken,
            "ended": self._ended,
            "put_back": [list(piece) for piece in self._put_back],
            "put_back_so_far": self.put_back,
            "global_tokens": self.global_tokens,
            "stream": self.stream.state(),
            "packer": self.packer.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue after the iteration at which `state` was taken. Raises ValueError if it does not fit."""
        if state.get("version") != STATE_VERSION:
            raise WlbError(
                f"planner state of version {state.get('version')!r}, this release reads {STATE_VERSION}: "
                "resume with the release that wrote it"
            )
        if state["global_tokens"] != self.global_tokens:
            raise WlbError(
                f"the saved plan has global batches of {state['global_tokens']} tokens, this run has "
                f"{self.global_tokens}: keep --global-batch-size x --seq-length"
            )
        self.packer.load_state(state["packer"])
        self.stream.load_state(state["stream"])
        self.iteration = int(state["iteration"])
        self.taken = int(state["taken"])
        self._ended = bool(state["ended"])
        self.put_back = int(state["put_back_so_far"])
        self._put_back = deque(Piece(*row) for row in state["put_back"])
