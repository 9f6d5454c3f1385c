"""From Megatron's arguments to planners over the corpus: opened at start, before a GPU allocates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blend import Blend
from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.passes import told_apart
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.documents.whole_documents import Bound, longest_whole
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunks.choose_chunks import holds_whole
from wlb_megatron.packing.fixed.batch_schedule import BatchSchedule
from wlb_megatron.packing.job import most_micro_batches, plan_job, sample_lengths_of, without_chunks
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plugin.flags.batch_sizes import BatchSizes
from wlb_megatron.plugin.flags.chunk_limits import chunks_refused
from wlb_megatron.plugin.flags.data_paths import documents
from wlb_megatron.plugin.flags.job_profile import profile_of
from wlb_megatron.plugin.flags.limits import (
    adoptable_tokens,
    document_memory,
    gpu_memory,
)
from wlb_megatron.plugin.flags.model_shape import attention_shape, token_alignment
from wlb_megatron.plugin.flags.open_files import allow_open_files
from wlb_megatron.plugin.flags.parallel_sizes import ParallelSizes
from wlb_megatron.plugin.logs.prediction import layer_model
from wlb_megatron.plugin.plans.data import files_of_workers
from wlb_megatron.workload.cost_model import (
    CostModel,
    backward_over_forward,
    document_cost,
    latent_parameters,
    layer_parameters,
    quadratic_at,
    with_windows,
)
from wlb_megatron.workload.costs import MicroBatchCost
from wlb_megatron.workload.costs import micro_batch_cost as costs_of_micro_batch
from wlb_megatron.workload.kernel_table import h100
from wlb_megatron.workload.micro_batch import MICRO_BATCH_TOKENS


@dataclass(frozen=True)
class Source:
    """One part (train, valid or test) of the corpus and the planner over it.

    micro_batches: of one DP rank by Megatron's count, at most; most_micro_batches: that it is planned with.
    mean_length: of a sample of the pieces (tokens). names: of the corpora that
    have documents in this part; documents: how many, in all of them. said: what the packer's choice says of itself.
    longest: tokens of a document that is not split, at most.
    """

    corpus: Blend
    planner: Planner
    config: WlbConfig
    micro_batches: int
    mean_length: float
    names: tuple[str, ...]
    documents: int
    said: tuple[str, ...] = ()
    longest: int = 0
    most_micro_batches: int = 0


def open_sources(args: Any, config: WlbConfig) -> dict[str, Source]:
    """Read the indices, make the packers, by part: "train" first, unless --skip-train; where they evaluate "valid" (or
    "valid 0", "valid 1" .. of several sets) and "test".

    WlbError (or ValueError) with one line for whatever is wrong with the data or the settings.
    Validation and test are packed whole and without delay, whatever packs the training, so that runs compare.
    """
    sizes = BatchSizes.of(args)
    opened: dict[tuple[str, ...], Blend] = {}
    sources: dict[str, Source] = {}
    if not getattr(args, "skip_train", False):
        train = open_part(args, config, "train", sizes.schedule, opened)
        assert train is not None  # without documents it has raised
        sources["train"] = train
    elif not args.eval_iters:
        raise WlbError(
            "--skip-train with --eval-iters 0 does nothing: give --eval-iters or --full-validation"
        )
    if args.eval_iters:
        plain = replace(config, packing="varlen", max_delay=0, thresholds="none")
        batches = BatchSchedule.constant(sizes.evaluated)
        if args.multiple_validation_sets:
            sources |= _validation_sets(args, plain, batches, opened)
        else:
            for part in ("valid", "test"):
                source = open_part(args, plain, part, batches, opened)
                if source is not None:
                    sources[part] = source
        if not any(part.startswith("valid") for part in sources):
            raise WlbError(
                "--eval-iters is above 0 but no document is left for validation: give --split such as 969,30,1, "
                "or --valid-data-path, or set --eval-iters 0"
            )
    return sources


def open_part(
    args: Any,
    config: WlbConfig,
    part: str,
    batches: BatchSchedule,
    opened: dict[tuple[str, ...], Blend] | None = None,
) -> Source | None:
    """The source of train, valid or test; None if it has no document. batches: micro-batches of all ranks.

    opened: what other parts have read, see data_paths.documents.
    """
    found = documents(args, part, opened)
    return None if found is None else _source(args, config, batches, *found, endless=part == "train")


def _validation_sets(
    args: Any, config: WlbConfig, batches: BatchSchedule, opened: dict[tuple[str, ...], Blend]
) -> dict[str, Source]:
    """A source for each corpus of the validation part."""
    found = documents(args, "valid", opened)
    if found is None:
        return {}
    blend, corpora = found
    names = getattr(args, "validation_set_names", None)
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
        f"valid {at}": _source(args, config, batches, blend, [corpus], endless=False)
        for at, corpus in enumerate(corpora)
    }


def _source(
    args: Any,
    config: WlbConfig,
    batches: BatchSchedule,
    blend: Blend,
    corpora: list[Corpus],
    *,
    endless: bool,
) -> Source:
    sizes, of = ParallelSizes.of(args), BatchSizes.of(args)
    dp, alignment = sizes.data, token_alignment(args)
    window, each = (of.joined_window, of.each) if endless else (of.evaluated_window, of.evaluated_each)
    # Documents are cut at --seq-length; a micro-batch is packed as one window of each x --seq-length.
    smallest = min(size for _, size in batches.steps) // dp
    batches = batches.joined(each)
    if not endless:
        config = replace(without_chunks(config), micro_batches_per_window="1")
        if not holds_whole(config, window, alignment):
            # A forward alone holds one micro-batch, so that whole documents fit where they do not in training.
            config = replace(config, max_tokens=-(-5 * window // (4 * alignment)) * alignment)
    said: list[str] = []
    longest, told = longest_whole(config.overlong, args.seq_length, smallest, *_bounds(args, config))
    rules = Rules(window=longest, overlong=config.overlong, seed=args.seed, endless=endless)
    stream = DocumentStream(corpora, rules)
    if not any(rules.predict(corpus.lengths) for corpus in corpora):
        raise WlbError(
            f"nothing to {'train' if endless else 'evaluate'}: no document has a second token, which the first would "
            f"predict, in {', '.join(corpus.name for corpus in corpora)}; correct the corpus or --split"
        )
    sample = sample_lengths_of(stream, sum(len(corpus.lengths) for corpus in corpora))
    planner = plan_job(
        stream,
        config,
        cost_model(args, config),
        window=window,
        micro_batches=batches.largest // dp,
        schedule=batches,
        dp=dp,
        pp=sizes.pipeline,
        vpp=sizes.virtual,
        group=sizes.micro_step_multiple,
        alignment=alignment,
        sample=sample,
        longest=stream.longest,
        adopt_max_tokens=adoptable_tokens(args, alignment),
        memory=gpu_memory(args, alignment),
        no_chunks=chunks_refused(args),
        say=said.append,
    )
    windows = batches.largest // dp
    most = most_micro_batches(planner.packer, config, windows)
    if args.num_workers:
        allow_open_files(files_of_workers(windows, most), "tensors from --num-workers")
    said += [told] * bool(told)
    return Source(
        blend,
        planner,
        config,
        batches.largest // dp,
        mean_length=sum(sample) / len(sample),
        names=tuple(told_apart([corpus.name for corpus in corpora])),
        documents=sum(len(corpus.lengths) for corpus in corpora),
        said=tuple(said),
        longest=longest,
        most_micro_batches=most,
    )


def _bounds(args: Any, config: WlbConfig) -> tuple[list[Bound], Bound | None]:
    """On documents that train whole, beside the iteration's tokens: the model's positions, and memory."""
    if config.overlong != "chunk":
        return [], None
    positions = Bound(args.max_position_embeddings, "--max-position-embeddings")
    return [positions], document_memory(args, config, token_alignment(args))


def complete(args: Any, config: WlbConfig) -> WlbConfig:
    """The settings with what the user left to the model's shape filled in."""
    heads, groups, channels = attention_shape(args)
    parameters = _layer_parameters(args)
    balanced, document = config.quadratic_at, config.document_cost
    profile = profile_of(args)
    if profile is not None:
        balanced = profile.costs.quadratic_at if balanced is None else balanced
        document = profile.costs.per_document if document is None else document
    if balanced is None:
        balanced = quadratic_at(heads * channels, parameters)
        balanced = with_windows(balanced, *_windows(args))
    if document is None:
        table = h100().scaled(heads=heads, kv_heads=groups, head_dim=channels)
        document = document_cost(table.segment, parameters) if args.distributed_backend == "nccl" else 0.0
    own = config.micro_batch_cost
    if own is None:
        own = micro_batch_cost(args, config).own
    return replace(config, quadratic_at=balanced, document_cost=document, micro_batch_cost=own)


def cost_model(args: Any, config: WlbConfig) -> CostModel:
    """What packing balances by; config: completed."""
    each = micro_batch_cost(args, config)
    cost = CostModel(
        _known(config.quadratic_at),
        _known(config.document_cost),
        each.own,
        each.least,
        each.chunk,
        _per_earlier_key(args),
        backward_over_forward(args.recompute_granularity == "full"),
    )
    return cost.with_micro_batch_cost(config.micro_batch_cost)


def _per_earlier_key(args: Any) -> float:
    """See CostModel. The network is the simulator's assumed one; 0 where its figures, a GPU's, say nothing."""
    profile = profile_of(args)
    if args.context_parallel_size == 1 or (profile is None and args.distributed_backend != "nccl"):
        return 0.0
    try:
        return layer_model(args, None if profile is None else profile.costs).cost().per_earlier_key
    except ValueError:  # a schedule that the simulator does not take; nor does it take chunks
        return 0.0


def micro_batch_cost(args: Any, config: WlbConfig) -> MicroBatchCost:
    """What a micro-batch costs by itself, over all context-parallel ranks; little is known of a CPU's."""
    ranks, profile = args.context_parallel_size, profile_of(args)
    stages, (heads, _, channels) = args.pipeline_model_parallel_size, attention_shape(args)
    if profile is None and args.distributed_backend != "nccl":
        return MicroBatchCost(MICRO_BATCH_TOKENS * ranks)
    return costs_of_micro_batch(
        None if profile is None else profile.costs,
        _layer_parameters(args) / args.tensor_model_parallel_size,
        heads * channels / args.tensor_model_parallel_size,
        ranks,
        recompute=args.recompute_granularity == "full",
        layers=max(1, args.num_layers // stages) if stages > 1 else None,
    )


def _layer_parameters(args: Any) -> int:
    """Weights of a layer's matrix products that a token passes."""
    heads, groups, channels = attention_shape(args)
    ffn = args.ffn_hidden_size
    if args.num_experts:
        ffn = (args.moe_ffn_hidden_size or ffn) * args.moe_router_topk
    latent = getattr(args, "multi_latent_attention", False)
    query, key = (0, 0) if latent else (heads * channels, groups * channels)
    parameters = layer_parameters(args.hidden_size, query, key, ffn, gated=args.swiglu)
    if latent:
        dims = args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim
        ranks = args.q_lora_rank or 0, args.kv_lora_rank
        parameters += latent_parameters(args.hidden_size, heads, *ranks, dims)
    return parameters


def _windows(args: Any) -> tuple[int, float]:
    """Window (tokens) of the windowed layers, and the share of layers that see whole documents."""
    from megatron.core.transformer.utils import is_layer_window_attention

    from wlb_megatron.attention.core_attention import window_of

    size, skip = window_of(args), getattr(args, "window_attn_skip_freq", None)
    if size is None:
        return 0, 1.0
    near = [is_layer_window_attention(args.window_size, skip, n + 1) for n in range(args.num_layers)]
    return size, 1 - sum(near) / len(near)


def _known(value: float | None) -> float:
    assert value is not None
    return value
