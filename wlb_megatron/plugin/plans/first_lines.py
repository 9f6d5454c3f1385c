"""What a job's log says of its plans before it trains."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from wlb_megatron.attention.kernels.kernel_choice import label
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.carry import weighs_equally
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.packer import read_per_window
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker
from wlb_megatron.plugin.flags.limits import recompute_memory
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.plans.source import Source
from wlb_megatron.registry import KERNELS
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN
from wlb_megatron.workload.memory import GIB
from wlb_megatron.workload.profile import Profile, host_name


def first_lines(source: Source, backend: str, steps: int | None = None) -> Iterator[str]:
    """Yields a line for each thing to know.

    source: the corpus that trains, or the first one of evaluation. backend: the kernels whose times plans use. steps:
    iterations of the whole run, None if that is not known.
    """
    job = source.job
    yield (
        f"{_documents_of(source)}, packing {source.config.packing}, micro-batches "
        f"of at most {source.planner.packer.max_tokens:,} tokens, sharding {source.config.sharding}, "
        f"attention costs as much as the rest at {source.config.quadratic_at:.0f} tokens"
    )
    stream = source.planner.stream
    if job.trains and job.device.rank == 0 and isinstance(stream, DocumentStream):  # rank 0 prints it
        yield _of_epochs(*stream.first_pass(), source, steps)
    yield from source.messages
    packer = source.planner.packer
    if job.trains and isinstance(packer, VarlenPacker) and packer.longest_delay:
        yield _of_delay(packer, equal=weighs_equally(source.config, packer))
    if job.trains:
        yield from _of_recomputation(source)
    experts = job.model.shape.experts
    if job.trains and job.device.on_gpu and experts:
        hopper = torch.cuda.get_device_capability(job.device.index)[0] == 9
        if settings := experts.faster_settings(hopper):
            yield f"experts train faster with {settings}; wlb-megatron analyze predicts the gain"
    if job.profile is not None:
        yield _of_profile(job.profile, job)
    elif (name := job.kernels()[0]) in KERNELS and name != backend:
        yield (
            f"planning with {label(backend)}'s kernel times: {label(name)}'s are not built in; wlb-megatron profile "
            "measures them"
        )


def _of_delay(packer: VarlenPacker, *, equal: bool) -> str:
    """Which documents wait, and what that does to a token's weight. equal: it is the same in every step."""
    weight = (
        "so a token weighs the same in every step (--wlb-token-weights equal)"
        if equal
        else "where a token weighs less in the gradient: --wlb-token-weights equal undoes that"
    )
    return (
        f"documents of {packer.thresholds[0]:,} tokens or more may wait up to {packer.longest_delay} iterations. They "
        f"train in fuller steps, {weight}"
    )


def _of_recomputation(source: Source) -> Iterator[str]:
    """What steps recompute of the layers that the flags name, or why all of these."""
    job = source.job
    if (job.sizes.recompute, source.config.recompute) != ("full", "auto"):
        return
    if source.config.cp_mode == "dynamic":
        yield "recomputes as the flags say in every step: the groups of --wlb-cp-mode dynamic are planned with that"
    elif changed := job.trainer.keeping_changes(source.config.chunks):
        yield f"recomputes as the flags say in every step, for kept layers would change {changed}"
    memory, packer = recompute_memory(job), source.planner.packer
    if memory is None or packer.law.rooms is None:
        return
    windows, window = memory.layout.micro_batches, memory.window
    work = windows * window * UNITS_PER_TOKEN
    max_tokens = packer.max_tokens
    count = -(-windows * window // max_tokens) if isinstance(packer, ChunkPacker) else windows
    fullest = packer.law.kept([max_tokens] * count, (count,) if isinstance(packer, ChunkPacker) else None)
    # Even micro-batches of a step's tokens, as many as take the least time.
    numbers = packer.law.counts(windows, read_per_window(source.config.micro_batches_per_window))
    even_count = min(numbers, key=lambda number: (packer.law.estimate(number, work), number))
    usual = packer.law.kept([-(-windows * window // even_count)] * even_count)
    yield (
        f"recomputes only what does not fit {memory.room / GIB:.1f} GiB of a GPU ({memory.size / GIB:.1f} less "
        f"--wlb-memory-margin {memory.margin:g}): of the layers that the flags recompute about {1 - usual / 1000:.0%} "
        f"in a usual step, {1 - fullest / 1000:.0%} in the fullest"
    )


def _documents_of(source: Source) -> str:
    """How many documents train (or are evaluated), and of how many, where others are held out."""
    of = source.corpus.first_ids[-1]
    return f"{source.documents:,} documents" + (f" of {of:,}" if of > source.documents else "")


def _of_epochs(name: str, tokens: int, source: Source, steps: int | None) -> str:
    """How many steps an epoch has (at the largest batch), and what comes after it."""
    epoch = tokens / source.planner.global_tokens
    what = "an epoch is" if len(source.names) == 1 else f"of the blend, {name} is passed first:"
    run_epochs = f"; the run's {steps:,} steps are {steps / epoch:,.2f} of them" if steps else ""
    return f"{what} {tokens:,} tokens, {epoch:,.0f} steps{run_epochs}. Then its documents come again in another order"


def _of_profile(profile: Profile, job: TrainingJob) -> str:
    """What the profile is of, and what of this job is unlike it."""
    line = f"planning and predicting with {profile.describe()}"
    if job.device.on_gpu:
        here = torch.cuda.get_device_name(job.device.index)
        if here != profile.device:
            line += f"; this GPU is another ({here}): its times are taken to be in proportion"
    here = host_name()
    if profile.host and profile.host != here:
        line += (
            f"; its host is another ({profile.host}, here {here}): if this one launches more slowly, steps take longer "
            f"than predicted. To replace {profile.path}, run wlb-megatron profile on a machine of this cluster"
        )
    kernels, _ = job.kernels()
    if kernels in KERNELS and profile.costs.table.backend != kernels:
        theirs = label(profile.costs.table.backend)
        line += f"; its attention is by {theirs}'s kernels, this job's by {label(kernels)}'s"
    vocabulary = job.model.vocabulary
    if vocabulary and vocabulary != profile.model.vocab:
        line += f"; its vocabulary is {profile.model.vocab:,}, not {vocabulary:,}: output and loss are predicted wrong"
    return line
