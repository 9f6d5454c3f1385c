"""The loader of planned micro-batches, and the plugin's iterators over it, which Megatron takes as they are (its
external data loader). Workers only read tokens, planning stays in the main process."""

from __future__ import annotations

import atexit
import errno
import inspect
import itertools
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Sampler, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from wlb_megatron.documents.blend import Blend
from wlb_megatron.errors import WlbError
from wlb_megatron.plugin import stores
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.job_state import Original
from wlb_megatron.plugin.micro_batches.loaded import Layout, LoadedMicroBatch, PackedDocuments
from wlb_megatron.plugin.micro_batches.planning import PlannedIteration, PlannedMicroBatch
from wlb_megatron.refusals import RefusedHere

SHARED_MEMORY_FULL = (
    "/dev/shm is full, in which --num-workers hand over micro-batches: give it more memory (docker run --shm-size or "
    "--ipc=host), or set --num-workers 0"
)


class MicroBatchSampler(Sampler[list[PlannedMicroBatch]]):
    """Yields the micro-batches of planned iterations, one a batch; notes each iteration's state as it passes.

    see: called with each iteration before any of it is given out.
    """

    def __init__(
        self, iterations: Iterable[PlannedIteration], see: Callable[[PlannedIteration], None] = lambda _: None
    ) -> None:
        self._iterations = iterations
        self._see = see
        self.passed: dict[int, PlannedIteration] = {}

    def __iter__(self) -> Iterator[list[PlannedMicroBatch]]:
        for iteration in self._iterations:
            self._see(iteration)
            self.passed[iteration.micro_batches[0].iteration] = iteration
            for micro_batch in iteration.micro_batches:
                yield [micro_batch]


def read_ahead(windows: int, iteration_micro_batches: int) -> int:
    """Micro-batches that workers read ahead: two iterations of one a window, or one of the most that an iteration may
    be planned with, if those are more."""
    return max(2 * windows, iteration_micro_batches)


def files_of_workers(windows: int, iteration_micro_batches: int) -> int:
    """Files that a process has open at most for what a loader's workers hand over: one a tensor, six a micro-batch,
    of those read ahead, of the iteration drawn ahead, and of the one that trains."""
    return 6 * (read_ahead(windows, iteration_micro_batches) + 2 * iteration_micro_batches)


def make_loader(
    corpus: Blend, sampler: MicroBatchSampler, layout: Layout, job: TrainingJob, prefetched: int
) -> DataLoader[LoadedMicroBatch]:
    """Loader over the plan; workers read about `prefetched` micro-batches before they are asked for.

    They ignore the signal that a scheduler sends to all processes of a job before its end (--exit-signal-handler). The
    trainer saves and exits then; workers that died of it would take the trainer with them first.
    """
    return DataLoader(
        PackedDocuments(corpus, layout),
        batch_sampler=sampler,
        num_workers=job.workers,
        prefetch_factor=-(-prefetched // job.workers) if job.workers else None,
        collate_fn=_only,
        pin_memory=job.device.on_gpu,
        persistent_workers=bool(job.workers),
        worker_init_fn=None if job.ignored_signal is None else partial(_ignore, job.ignored_signal),
    )


def _ignore(number: int, worker: int) -> None:
    signal.signal(number, signal.SIG_IGN)


def _only(items: list[LoadedMicroBatch]) -> LoadedMicroBatch:
    """The one item of a batch. A worker shares its tensors here. Else its queue does so in a thread, which drops the
    micro-batch where memory is full, and the trainer waits for ever."""
    (item,) = items
    if get_worker_info() is not None:
        try:
            tree_map_only(torch.Tensor, torch.Tensor.share_memory_, item)
        except RuntimeError as error:
            raise WlbError(f"{SHARED_MEMORY_FULL} ({str(error).splitlines()[0]})") from None
    return item


class MicroBatchIterator:
    """The loader's iterator, marked as the plugin's (Megatron's external dataloader is used as it comes)."""

    def __init__(
        self,
        loader: DataLoader[LoadedMicroBatch],
        after_step: Callable[[list[LoadedMicroBatch], bool], None] = lambda *_: None,
        rehearsal: Any = None,
        equal_tokens: int = 0,
        *,
        defers_losses: bool = False,
    ) -> None:
        """Iterate over the loader.

        after_step: called with the micro-batches of a step when it is done, and whether it was skipped. rehearsal: what
        step/rehearsal.py runs first. equal_tokens: by how many tokens a step's gradients are divided for each of
        Megatron's micro-batches; 0: by the tokens that the step has. defers_losses: see step/losses.py.
        """
        self.equal_tokens = equal_tokens
        self.defers_losses = defers_losses
        try:
            self._iterator: Iterator[LoadedMicroBatch] = iter(loader)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # What is half made has none, and its destructor asks.
            _MultiProcessingDataLoaderIter._shutdown = True
            raise RefusedHere(f"{SHARED_MEMORY_FULL} ({error})") from None
        self.after_step, self.rehearsal = after_step, rehearsal
        self.began = 0.0  # the step that runs (time.perf_counter)
        self._drawn: deque[LoadedMicroBatch | Exception] = deque()
        # Workers that ignore a signal are not ended by it when Python exits: end them before it tries.
        atexit.register(self.close)

    def close(self) -> None:
        """End the workers. The traceback of an error that they raised keeps the loader's iterator, so that its
        destructor does not run; Python's exit would then wait for ever for workers that ignore SIGTERM."""
        iterator, self._iterator = self._iterator, iter(())
        self._drawn.clear()
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()
            for worker in iterator._workers:
                worker.kill()  # one that is stuck in a read has not ended

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> LoadedMicroBatch:
        try:
            micro_batch = self._drawn.popleft() if self._drawn else next(self._iterator)
            if isinstance(micro_batch, Exception):
                raise micro_batch
        except StopIteration:
            raise
        except WlbError as error:
            # A worker's error comes with its stack in front of its line.
            line = str(error).strip().splitlines()[-1].removeprefix(f"{WlbError.__module__}.WlbError: ")
            stores.tell_failure(line)
            raise RefusedHere(line) from None
        except Exception:
            stores.tell_failure("it cannot draw its next micro-batch, and its own error says why")
            raise
        return micro_batch

    def draw_ahead(self, count: int) -> None:
        """Draw micro-batches of the next step until there are `count`. Called while the device is busy.

        Between steps it stands still while micro-batches are drawn, and while threads that a draw wakes (the one that
        plans, the loader's) hold the interpreter: 3 to 7 ms.
        """
        failed = bool(self._drawn) and isinstance(self._drawn[-1], Exception)
        try:
            while not failed and len(self._drawn) < count:
                self._drawn.append(next(self._iterator))
        except Exception as error:
            self._drawn.append(error)  # is the next step's; a loader asked again passes over what failed


def over_and_over(coming: Iterable[PlannedIteration], iterations: int | None) -> Iterator[PlannedIteration]:
    """An evaluation's iterations again and again, each time from the first one; planned when they are first asked for.

    iterations: the number that an evaluation takes, None for all that come. Of a set of three iterations an evaluation
    of four takes 0 1 2 0, and so does the next one.
    """
    again = itertools.cycle(coming)
    return again if iterations is None else itertools.cycle(itertools.islice(again, iterations))


class WholeSetIterator(MicroBatchIterator):
    """Over a set again and again, by evaluations that take all of it. Its length is the number of its iterations."""

    def __init__(self, loader: DataLoader[LoadedMicroBatch], iterations: Iterable[PlannedIteration]) -> None:
        """iterations: those of the set, once."""
        super().__init__(loader)
        self._iterations = iterations

    def __len__(self) -> int:
        """Plans them all. Megatron asks at its start with several sets, else the first evaluation does."""
        self._iterations = list(self._iterations)
        return len(self._iterations)


def planned_iterator(data_iterator: Any) -> MicroBatchIterator | None:
    """The plugin's iterator inside Megatron's (replayable) one, or None if it is another's."""
    iterator = getattr(data_iterator, "iterable", data_iterator)
    return iterator if isinstance(iterator, MicroBatchIterator) else None


def draw_step(data_iterator: Any) -> list[LoadedMicroBatch]:
    """A step's micro-batches: as many as the iteration was planned with, whatever Megatron counts."""
    first = next(data_iterator)
    return [first, *(next(data_iterator) for _ in range(first.planned.steps - 1))]


def wrap_dummy_train_step(original: Original, data_iterator: Any) -> Any:
    """dummy_train_step of --iterations-to-skip: the documents of such an iteration are given out and not trained.

    Megatron draws its batches by its own data loader's layout, and neither logs nor saves after it. A plan may have
    any number of micro-batches.
    """
    first = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    source = planned_iterator(first)
    if source is None:
        return original(data_iterator)
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    rerun = get_rerun_state_machine()
    while rerun.should_run_forward_backward(data_iterator):
        batches = draw_step(first)
    source.after_step(batches, True)
    return None


def wrap_evaluate(original: Original, *args: Any, **kwargs: Any) -> Any:
    """evaluate() with --full-validation: over as many iterations as cover the set once.

    Megatron counts a loader's batches and cycles over it; with a single set it fails (0.18 to 0.20 take the first
    element of a number). Here a set's iterations are known from its plan, the same on every rank.
    """
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    iterators = arguments["data_iterator"]
    iterator = planned_iterator(iterators[0] if isinstance(iterators, list) else iterators)
    if isinstance(iterator, WholeSetIterator):
        arguments["eval_iters"] = len(iterator)
    return original(**arguments)


def wrap_cyclic_iter(original: Original, iterable: Any) -> Any:
    """cyclic_iter() that leaves the plugin's iterator as it is: it begins again by itself."""
    return iterable if isinstance(iterable, MicroBatchIterator) else original(iterable)
