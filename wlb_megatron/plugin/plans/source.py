"""From the job to planners over the corpus, opened at start, before a GPU allocates; and what the log then says of
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from wlb_megatron.attention.kernels.kernel_choice import label
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blend import Blend
from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.lengths import Bound, longest_whole
from wlb_megatron.documents.stream import DocumentStream, distinguish
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.carry import weighs_equally
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.factory import most_micro_batches, plan_job, sample_lengths_of, without_chunks
from wlb_megatron.packing.limits import holds_whole
from wlb_megatron.packing.packer import PackingJob, read_per_window
from wlb_megatron.packing.planner import BatchSchedule, Planner
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker
from wlb_megatron.plugin.flags.data_paths import allow_open_files, documents
from wlb_megatron.plugin.flags.limits import (
    adoptable_tokens,
    cost_model,
    document_memory,
    gpu_memory,
    recompute_memory,
)
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.logs.prediction import plan_times
from wlb_megatron.plugin.micro_batches.iterators import files_of_workers, read_ahead
from wlb_megatron.registry import KERNELS
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN
from wlb_megatron.workload.memory import GIB
from wlb_megatron.workload.profile import Profile, host_name


@dataclass(frozen=True)
class Source:
    """One part (train, valid or test) of the corpus and the planner over it.

    job: the job with the settings of this part. read_ahead: micro-batches that a loader's workers read before they are
    asked for. mean_length: mean tokens of a sample of the pieces. names: corpora that have documents in this part.
    documents: their number, in all corpora. messages: lines about the packer's choice. longest: tokens of a document
    that is not split, at most. trained_share: share of the tokens that are targets. train_samples: windows until the
    last epoch ends, None if epochs do not end the run.
    """

    corpus: Blend
    planner: Planner
    job: TrainingJob
    read_ahead: int
    mean_length: float
    names: tuple[str, ...]
    documents: int
    messages: tuple[str, ...] = ()
    longest: int = 0
    trained_share: float = 1.0
    train_samples: int | None = None

    @property
    def config(self) -> WlbConfig:
        """The settings of this part, completed."""
        return self.job.config

    def with_config(self, config: WlbConfig) -> Source:
        """The same with other settings."""
        return replace(self, job=self.job.with_config(config))


def open_sources(job: TrainingJob) -> dict[str, Source]:
    """Read the indices, make the packers, by part: "train" first, unless --skip-train; where they evaluate "valid" (or
    "valid 0", "valid 1" .. of several sets) and "test".

    WlbError (or ValueError) with one line for whatever is wrong with the data or the settings.
    Validation and test are packed whole and without delay, whatever packs the training, so that runs compare.
    """
    evaluation = job.evaluation
    blends: dict[tuple[str, ...], Blend] = {}
    sources: dict[str, Source] = {}
    if job.trains:
        train = open_part(job, "train", job.batches.schedule, blends)
        assert train is not None  # without documents it has raised
        sources["train"] = train
    elif not evaluation.iterations:
        raise WlbError(
            "--skip-train with --eval-iters 0 does nothing: give --eval-iters or --full-validation"
        )
    if evaluation.iterations:
        plain = job.with_config(replace(job.config, packing="varlen", max_delay=0, thresholds="none"))
        batches = BatchSchedule.constant(job.batches.evaluated)
        if evaluation.each_set:
            sources |= _validation_sets(plain, batches, blends)
        else:
            for part in ("valid", "test"):
                source = open_part(plain, part, batches, blends)
                if source is not None:
                    sources[part] = source
        if not any(part.startswith("valid") for part in sources):
            raise WlbError(
                "--eval-iters is above 0 but no document is left for validation: give --split such as 969,30,1, "
                "or --valid-data-path, or set --eval-iters 0"
            )
    return sources


def open_part(
    job: TrainingJob,
    part: str,
    batches: BatchSchedule,
    blends: dict[tuple[str, ...], Blend] | None = None,
) -> Source | None:
    """The source of train, valid or test; None if it has no document.

    batches: micro-batches of all ranks. blends: corpora that other parts have read, see data_paths.documents.
    """
    blend_and_corpora = documents(job.data, part, blends)
    if blend_and_corpora is None:
        return None
    return _source(job, batches, *blend_and_corpora, endless=part == "train")


def _validation_sets(
    job: TrainingJob, batches: BatchSchedule, blends: dict[tuple[str, ...], Blend]
) -> dict[str, Source]:
    """A source for each corpus of the validation part."""
    blend_and_corpora = documents(job.data, "valid", blends)
    if blend_and_corpora is None:
        return {}
    blend, corpora = blend_and_corpora
    names = job.evaluation.names
    if len(corpora) < len(blend.paths):
        raise WlbError(
            "--multiple-validation-sets, but one of the corpora has no document (or weight) for validation: leave "
            "it out"
        )
    if names and len(names) != len(corpora):
        raise WlbError(
            f"--validation-set-names gives {len(names)} names for {len(corpora)} corpora: give one name each"
        )
    return {
        f"valid {number}": _source(job, batches, blend, [corpus], endless=False)
        for number, corpus in enumerate(corpora)
    }


def _source(
    job: TrainingJob,
    batches: BatchSchedule,
    blend: Blend,
    corpora: list[Corpus],
    *,
    endless: bool,
) -> Source:
    sizes, of, alignment, config = job.sizes, job.batches, job.alignment, job.config
    window, micro_batch_size = of.joined_window, of.micro_batch_size
    if not endless:
        window, micro_batch_size = of.evaluated_window, of.evaluated_micro_batch_size
    # Documents are cut at --seq-length; a micro-batch is packed as one window of micro_batch_size x --seq-length.
    smallest_batch = min(size for _, size in batches.steps) // sizes.data
    batches = batches.joined(micro_batch_size)
    windows = batches.largest // sizes.data
    if not endless:
        config = replace(without_chunks(config), micro_batches_per_window="1")
        if not holds_whole(config, window, alignment):
            # A forward alone holds one micro-batch, so that whole documents fit where they do not in training.
            config = replace(config, max_tokens=-(-5 * window // (4 * alignment)) * alignment)
        job = job.with_config(config)
    messages: list[str] = []
    # The longest document that is not split: by the iteration's tokens, the model's positions and memory.
    in_chunks = config.overlong == "chunk"
    bounds = [Bound(job.model.positions, "--max-position-embeddings")] if in_chunks else []
    memory = document_memory(job) if in_chunks else None
    longest_document, limits = longest_whole(config.overlong, of.window, smallest_batch, bounds, memory)
    overlong = config.overlong
    if blend.masked and overlong in ("split", "chunk"):  # a conversation is not split
        # As short as the longest one, so that the order does not depend on what another layout could hold.
        longest_one = max((int(corpus.lengths.max()) for corpus in corpora), default=0)
        longest_document, overlong = max(of.window, min(longest_document, longest_one)), "drop"
        limits = limits.replace("are split", "are dropped")
    # The stream of pieces, and a sample of their lengths.
    epochs = config.train_epochs if endless else None
    rules = Rules(window=longest_document, overlong=overlong, seed=job.seed, endless=endless, epochs=epochs)
    if blend.masked:
        messages += _left_out(corpora, rules)
    stream = DocumentStream(corpora, rules)
    if not any(rules.predict(corpus.lengths) for corpus in corpora):
        raise WlbError(
            f"nothing to {'train' if endless else 'evaluate'}: no document has a second token, which the first would "
            f"predict, in {', '.join(corpus.name for corpus in corpora)}; correct the corpus or --split"
        )
    sample = sample_lengths_of(stream, sum(len(corpus.lengths) for corpus in corpora))
    # The planner over them.
    layer_memory = recompute_memory(job) if endless else None
    no_chunks, planned_config = job.trainer.chunks_refused(config.chunks), config
    if endless and job.given.chunks == config.chunks == "off" and overlong != "chunk":
        # Whole documents as auto takes them, so that the line on chunks says what the flag costs.
        no_chunks = [("--wlb-chunks off", "leave it out"), *no_chunks]
        planned_config = replace(config, chunks="auto")
    packing = PackingJob(
        config=planned_config,
        cost=cost_model(job),
        window=window,
        micro_batches=windows,
        dp=sizes.data,
        pp=sizes.pipeline,
        vpp=sizes.virtual,
        group=sizes.micro_step_multiple,
        alignment=alignment,
        sample=sample,
        longest=stream.longest,
        adopt_max_tokens=adoptable_tokens(job),
        rooms=None if layer_memory is None else layer_memory.rooms(),
        times=plan_times(job, layer_memory) if endless else None,
        no_chunks=no_chunks,
        say=messages.append,
    )
    planner = plan_job(stream, packing, schedule=batches, memory=gpu_memory(job))
    # Where epochs end the run, the step in which the last one does.
    samples = None
    if epochs is not None:
        if blend.weights is not None:
            raise WlbError(
                "--wlb-train-epochs with weights in --data-path: corpora would end at different times; leave the "
                "weights out, which gives each its share of tokens, or give --train-samples"
            )
        steps, line = steps_of(corpora, rules, planner.global_tokens)
        planner.until = steps * batches.largest
        samples = planner.until * micro_batch_size
        messages.append(line)
    micro_batch_limit = most_micro_batches(planner.packer, config, windows)
    if job.workers:
        allow_open_files(files_of_workers(windows, micro_batch_limit), "tensors from --num-workers")
    messages += [limits] * bool(limits)
    return Source(
        blend,
        planner,
        job,
        read_ahead(windows, micro_batch_limit),
        mean_length=sum(sample) / len(sample),
        names=tuple(distinguish([corpus.name for corpus in corpora])),
        documents=sum(len(corpus.lengths) for corpus in corpora),
        messages=tuple(messages),
        longest=longest_document,
        trained_share=blend.trained_share(corpora, rules),
        train_samples=samples,
    )


def steps_of(corpora: list[Corpus], rules: Rules, step_tokens: int) -> tuple[int, str]:
    """Steps until the last epoch ends, and a line that says so; in whatever order documents come.

    Each step takes in documents until all steps so far have their tokens. So the last document, of d tokens at most,
    comes in step (tokens - d) / step_tokens or later; the last step takes in what is left. Example: 3 epochs of 40
    tokens in steps of 16, d = 10: 6 full steps and a last one of 24 tokens at most.
    """
    assert rules.epochs is not None
    lengths = [rules.kept(np.asarray(corpus.lengths, dtype=np.int64)) for corpus in corpora]
    tokens = sum(int(each.sum()) for each in lengths)
    longest_document = max(int(each.max()) for each in lengths)
    steps = (rules.epochs * tokens - longest_document) // step_tokens + 1
    return steps, (
        f"{rules.epochs} epochs of {tokens:,} tokens take {steps:,} steps, {tokens / step_tokens:,.1f} an epoch"
    )


def _left_out(corpora: list[Corpus], rules: Rules) -> list[str]:
    """Conversations that do not train as they are: a line if there are any."""
    long_count = sum(int((np.asarray(corpus.lengths) > rules.window).sum()) for corpus in corpora)
    empty_count = sum(int((np.asarray(corpus.lengths) == 0).sum()) for corpus in corpora)
    fate = "keep the window with the most targets" if rules.overlong == "truncate" else "are dropped"
    lines = [f"{long_count:,} conversations above {rules.window:,} tokens {fate}"] if long_count else []
    return lines + ([f"{empty_count:,} conversations without a target are dropped"] if empty_count else [])


def first_lines(source: Source, backend: str, steps: int | None = None) -> Iterator[str]:
    """What a job's log says of its plans before it trains: a line for each thing to know.

    source: the corpus that trains, or the first one of evaluation. backend: the kernels whose times plans use. steps:
    iterations of the whole run, None if that is not known.
    """
    job, of = source.job, source.corpus.first_ids[-1]
    held_out = f" of {of:,}" if of > source.documents else ""
    yield (
        f"{source.documents:,} documents{held_out}, packing {source.config.packing}, micro-batches "
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
    elif (name := job.kernels()) in KERNELS and name != backend:
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
    kernels = job.kernels()
    if kernels in KERNELS and profile.costs.table.backend != kernels:
        theirs = label(profile.costs.table.backend)
        line += f"; its attention is by {theirs}'s kernels, this job's by {label(kernels)}'s"
    vocabulary = job.model.vocabulary
    if vocabulary and vocabulary != profile.model.vocab:
        line += f"; its vocabulary is {profile.model.vocab:,}, not {vocabulary:,}: output and loss are predicted wrong"
    return line
