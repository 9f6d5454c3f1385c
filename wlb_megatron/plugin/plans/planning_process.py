"""Planning in a process of its own, so that large iterations leave the interpreter to the thread that launches kernels.

The child gets the planner as it stands, and sends iterations as fast as the pipe takes them. A thread of the parent
takes them a micro-batch at a time, so that no call holds the interpreter for long. Both kinds of planning run
`planning.plan_iterations`: nothing here decides anything.

Pickle is spoken on the pipe alone, between a process and the child that it started.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from wlb_megatron.child import Child, pipes, read_message, write_message
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plugin.micro_batches.planning import PlannedIteration, ShardSettings, plan_iterations

LEAST_DOCUMENTS = 1000
"""Documents of an iteration from which a process plans. Fewer are planned in some 15 ms, which a step does not feel."""

_PAUSE = 1e-4
"""Seconds before a message is unpacked: a thread that goes on keeps the interpreter for 5 ms from one that wants it."""


@dataclass(frozen=True)
class _Failed:
    """Sent instead of an iteration. own: the text is a WlbError's line, else a traceback."""

    text: str
    own: bool


def in_a_process(planner: Planner, config: WlbConfig, mean_length: float) -> bool:
    """Whether a process plans. mean_length: tokens of a piece.

    Not with dynamic groups, whose ranks talk to each other as they plan.
    """
    if config.cp_mode == "dynamic" or config.plan_process == "never":
        return False
    return config.plan_process == "always" or planner.global_tokens / mean_length >= LEAST_DOCUMENTS


def plan_in_a_process(
    planner: Planner,
    settings: ShardSettings,
    *,
    keeps_plans: bool = False,
    started: Callable[[Child], None] = lambda _: None,
) -> Iterator[PlannedIteration]:
    """What `plan_iterations` gives, made by a child; this process's planner stays as it is.

    keeps_plans: iterations come with the plan of all data-parallel ranks. started: gets the child. Raises what planning
    raises, and WlbError where the child ends before the plans do. Where none can be started, this process plans, after
    a warning.
    """
    try:
        child = Child("wlb_megatron.plugin.plans.planning_process")
    except OSError as error:
        print(
            f"WARNING: wlb_megatron: no process can be started to plan ({error}): a thread does", flush=True
        )
        yield from plan_iterations(planner, settings)
        return
    atexit.register(child.kill)
    started(child)
    try:
        child.send(_dumps((planner, settings, keeps_plans)))
        while (answer := _receive(child)) is not None:
            if isinstance(answer, _Failed):
                raise (
                    WlbError(answer.text)
                    if answer.own
                    else RuntimeError(f"wlb_megatron: planning failed\n{answer.text}")
                )
            planned, micro_batches = answer
            yield replace(planned, micro_batches=tuple(_receive(child) for _ in range(micro_batches)))
    except (OSError, EOFError) as error:
        raise _silent(error) from None
    finally:
        child.kill()
        atexit.unregister(child.kill)


def check_alive(children: Sequence[Child]) -> None:
    """Raise what the planning thread raises only once it has taken all plans from the pipe, often hundreds."""
    for child in children:
        if (ending := child.failure()) is not None:
            raise _silent(ending)


def _silent(why: object) -> WlbError:
    return WlbError(
        f"the process that plans iterations does not answer ({why}): see whether the node ran out of memory, and start "
        "again from the last checkpoint"
    )


def _receive(child: Child) -> Any:
    message = child.receive()
    assert message is not None  # nobody hurries
    time.sleep(_PAUSE)
    return pickle.loads(message)


def serve(messages: BinaryIO, answers: BinaryIO) -> None:
    """Plan what the one message describes, until the planner's stream ends or nobody reads any more."""
    try:
        planner, settings, keeps_plans = pickle.loads(read_message(messages) or b"")
        for planned in plan_iterations(planner, settings):
            state = partial(json.loads, json.dumps(planned.state()))
            plan = planned.plan if keeps_plans else None
            head = replace(planned, micro_batches=(), state=state, plan=plan)
            write_message(answers, _dumps((head, len(planned.micro_batches))))
            for micro_batch in planned.micro_batches:
                write_message(answers, _dumps(micro_batch))
        write_message(answers, _dumps(None))
    except BrokenPipeError:
        os._exit(0)  # the parent has ended
    except Exception as error:
        own = isinstance(error, WlbError)
        write_message(answers, _dumps(_Failed(str(error) if own else traceback.format_exc(), own)))


class _Pickler(pickle.Pickler):
    """Sends where an array is mapped from, not the array: an index stays in its file."""

    def reducer_override(self, value: Any) -> Any:
        file = (
            _mapped(value) if type(value) is np.ndarray and value.flags.c_contiguous and value.size else None
        )
        if file is None:
            return NotImplemented
        offset = file.offset + value.__array_interface__["data"][0] - file.__array_interface__["data"][0]
        return _map, (str(file.filename), value.dtype, offset, value.shape)


def _mapped(value: Any) -> np.memmap[Any, Any] | None:
    """The mapping that an array is a part of."""
    while value is not None and not isinstance(value, np.memmap):
        value = value.obj if isinstance(value, memoryview) else getattr(value, "base", None)
    return None if value is None or value.filename is None else value


def _map(name: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.asarray(np.memmap(name, dtype=dtype, mode="r", offset=offset, shape=shape))


def _dumps(value: Any) -> bytes:
    written = io.BytesIO()
    _Pickler(written, protocol=5).dump(value)
    return written.getvalue()


if __name__ == "__main__":
    # Not __main__'s own: what is pickled here is looked up there by the module's name.
    from wlb_megatron.plugin.plans import planning_process

    planning_process.serve(*pipes())
