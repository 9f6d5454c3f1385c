"""A job as Megatron's validated flags describe it, read once: the only form in which plans and logs know them.

What changes after the flags are checked (the iteration, samples consumed, the number of micro-batches) is not in it.
Who needs that reads it from Megatron where it stands, and hands it on as a value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from wlb_megatron.attention.kernels import kernel_choice
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.limits import Trainer
from wlb_megatron.packing.planner import BatchSchedule, linear_ramp
from wlb_megatron.plugin.flags.data_paths import DataPaths, FineTuning
from wlb_megatron.plugin.flags.trained_model import TrainedModel, balancing_of, layer_kinds
from wlb_megatron.refusals import delta_nets, one_length
from wlb_megatron.sharding.slots import multiple
from wlb_megatron.workload.cost_model import Costs
from wlb_megatron.workload.model import Layout, layer_count
from wlb_megatron.workload.profile import Profile, read_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """This rank's device. `on_gpu` means that NCCL runs; `index` is the GPU's in its node, `rank` the rank in the
    whole job."""

    on_gpu: bool
    index: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How the job evaluates: for `iterations`, 0 for never, or over whole sets (`full`). With `each_set` every corpus
    is a set of its own, by these names if there are any."""

    iterations: int = 0
    full: bool = False
    each_set: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One job's settings, the plugin's and Megatron's.

    Args:
        given: the plugin's settings as the user gave them.
        config: the same, completed as far as is known.
        trains: not --skip-train.
        profile: the one that --wlb-profile names.
        workers: processes of a data loader.
        ignored_signal: makes the trainer save and exit; workers must ignore it.
        recompute_blocks: layers of a model chunk that --recompute-method block recomputes; None: all, if it does any.
        one_length: Megatron holds buffers or graphs of one length.
        timeout: minutes that communication between ranks may take.
        fine_tuning: settings of --sft.
    """

    given: WlbConfig
    config: WlbConfig
    model: TrainedModel
    sizes: Layout
    batches: BatchSizes
    data: DataPaths
    trainer: Trainer
    evaluation: Evaluation
    device: RankDevice
    profile: Profile | None
    trains: bool
    seed: int
    workers: int
    ignored_signal: int | None
    recompute_blocks: int | None
    one_length: bool
    timeout: int
    fine_tuning: FineTuning | None = None

    @classmethod
    def of(cls, args: Any, settings: WlbConfig) -> TrainingJob:
        """args: Megatron's validated arguments; what a release does not know is taken as not given.

        WlbError where flags do not fit together or a file that one names cannot be read.
        """
        model, batches = TrainedModel.of(args), BatchSizes.of(args)
        full_validation = bool(getattr(args, "full_validation", False))
        sizes = layout_of(args, batches, keep_keys=not settings.regather_keys)
        return cls(
            given=settings,
            config=settings,
            model=model,
            sizes=sizes,
            batches=batches,
            data=DataPaths.of(args),
            trainer=trainer_of(args),
            evaluation=Evaluation(
                iterations=args.eval_iters or int(full_validation),
                full=full_validation,
                each_set=args.multiple_validation_sets,
                names=tuple(getattr(args, "validation_set_names", None) or ()),
            ),
            device=RankDevice(
                on_gpu=args.distributed_backend == "nccl",
                index=args.local_rank,
                rank=getattr(args, "rank", 0),
            ),
            profile=profile_of(settings.profile, model, sizes.tensor),
            trains=not getattr(args, "skip_train", False),
            seed=args.seed,
            workers=args.num_workers,
            ignored_signal=int(args.exit_signal) if args.exit_signal_handler else None,
            recompute_blocks=_recomputed_blocks(args),
            one_length=one_length(args),
            timeout=args.distributed_timeout_minutes,
            fine_tuning=FineTuning.of(args, settings),
        )

    @property
    def costs(self) -> Costs | None:
        """Costs that the profile has measured; None without a profile."""
        return None if self.profile is None else self.profile.costs

    @property
    def recomputed_share(self) -> float:
        """Layers recomputed in full, by the flags, of all layers."""
        if self.sizes.recompute != "full":
            return 0.0
        chunk = layer_count(self.model.shape.layers) / (self.sizes.pipeline * self.sizes.virtual)
        return 1.0 if self.recompute_blocks is None else min(1.0, self.recompute_blocks / chunk)

    @property
    def alignment(self) -> int:
        """A micro-batch's tokens are a multiple of this: equal shares for CP ranks, and for TP under sequence parallel.

        With FP8 each share is a multiple of the GEMMs' rows. Where Megatron holds buffers or graphs of one length, it
        is the window: packings of windows then have no other.
        """
        return self.batches.joined_window if self.one_length else self.shares

    @property
    def shares(self) -> int:
        """Of which a micro-batch's tokens are a multiple in any case."""
        return multiple(self.sizes.context, self.sizes.tensor, self.model.rows)

    def window_misfit(self) -> str | None:
        """Why a window cannot be padded as micro-batches are; None if it can."""
        shares, window, rows = self.shares, self.batches.window, self.model.rows
        if window % shares == 0:
            return None
        of = f" x {rows} rows, which FP8's matrix products need on each rank" if rows > 1 else ""
        return (
            f"{window} tokens are not a multiple of {shares}, to which micro-batches are padded (context-parallel size "
            f"{self.sizes.context} x tensor-parallel size {self.sizes.tensor}{of}); set it to "
            f"{-(-window // shares) * shares}"
        )

    def kernels(self) -> str:
        """The name of --wlb-kernels' kernels (of registry.KERNELS, or "torch"), as the flags say it before the model is
        built.

        Of layers of another shape (heterogeneous models) each decides for itself. WlbError if those
        of --wlb-kernels cannot be.
        """
        model = self.model
        if model.implementation != "transformer_engine":
            return "torch"
        import torch  # not for the process that plans

        layer = kernel_choice.Layer(
            dim=model.shape.head_dim,
            v_dim=model.value_dim,
            grouped=model.shape.kv_heads != model.shape.heads,
            dtype=model.dtype,
            capability=torch.cuda.get_device_capability(self.device.index) if self.device.on_gpu else None,
        )
        name, _ = kernel_choice.chosen(self.given.kernels, layer)
        return name

    def with_config(self, config: WlbConfig) -> TrainingJob:
        """The same with these settings."""
        return replace(self, config=config)

    def with_vocabulary(self, rows: int) -> TrainingJob:
        """The same once the tokenizer is built, which Megatron does after the flags are checked."""
        shape = replace(self.model.shape, vocab=rows)
        return replace(self, model=replace(self.model, vocabulary=rows, shape=shape))


def _recomputed_blocks(args: Any) -> int | None:
    if args.recompute_method != "block":
        return None
    return max(1, (args.recompute_num_layers or 1) * layer_kinds(args)[0] // args.num_layers)


def layout_of(args: Any, batches: BatchSizes, *, keep_keys: bool) -> Layout:
    """args: Megatron's validated arguments. keep_keys: not --wlb-regather-keys."""
    megatron_fsdp = getattr(args, "use_megatron_fsdp", False)
    strategy = getattr(args, "data_parallel_sharding_strategy", None)
    torch_fsdp = bool(getattr(args, "use_torch_fsdp2", False))
    layout = Layout(
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        data=args.data_parallel_size,
        virtual=args.virtual_pipeline_model_parallel_size or 1,
        group=getattr(args, "microbatch_group_size_per_vp_stage", None),
        sequence=args.sequence_parallel,
        distributed_optimizer=bool(args.use_distributed_optimizer),
        reduce_overlaps=bool(getattr(args, "overlap_grad_reduce", False)),
        gather_overlaps=bool(getattr(args, "overlap_param_gather", False)),
        fully_sharded=torch_fsdp or (megatron_fsdp and strategy == "optim_grads_params"),
        losses_in_forward=torch_fsdp or bool(megatron_fsdp),
        recompute=args.recompute_granularity or "none",
        recompute_layers=args.recompute_num_layers or 1,
        recompute_block=args.recompute_method == "block",
        keep_keys=keep_keys,
        fused=bool(getattr(args, "gradient_accumulation_fusion", True)),
    )
    count, multiple = (
        batches.schedule.largest // (layout.data * batches.micro_batch_size),
        layout.micro_step_multiple,
    )
    return replace(layout, micro_batches=max(1, -(-count // multiple)) * multiple)


def profile_of(path: str | None, model: TrainedModel, tensor: int) -> Profile | None:
    """The job's profile, or None without a path. WlbError where it is of another model, or cannot be read.

    tensor: tensor-parallel size.
    """
    if path is None:
        return None
    profile = read_profile(path)
    profile.refuse_other(replace(model.shape, ffn=model.ffn), tensor, any_vocabulary=True)
    return profile


def trainer_of(args: Any) -> Trainer:
    """args: Megatron's validated arguments; what a release does not know is taken as not given."""
    # Imported here, because it imports torch, which the process that plans has no use for.
    from megatron.core.transformer.transformer_block import TransformerBlock

    def setting(name: str) -> Any:
        return getattr(args, name, None)

    return Trainer(
        stages=args.pipeline_model_parallel_size,
        tensor=args.tensor_model_parallel_size,
        experts=setting("num_experts") or 0,
        expert=args.expert_model_parallel_size or 1,
        expert_tensor=args.expert_tensor_parallel_size,
        balancing=balancing_of(args),
        shards_weights=bool(setting("use_megatron_fsdp") or setting("use_torch_fsdp2")),
        shares_scales=_shares_scales(setting),
        offloads=bool(setting("fine_grained_activation_offloading")),
        interleaves=bool(setting("virtual_pipeline_model_parallel_size")),
        offloads_layers=bool(setting("cpu_offloading_num_layers")),
        replays_routes=bool(setting("moe_enable_routing_replay")),
        # Where the block has this function itself (dev). Elsewhere megatron.core.recompute hands the mask on.
        hides_padding=hasattr(TransformerBlock, "_checkpointed_forward"),
        delta_nets=delta_nets(args),
    )


def _shares_scales(setting: Callable[[str], Any]) -> bool:
    """Whether FP8 may reduce the largest values over data-parallel ranks in each forward and backward.

    Delayed scaling does, over tensor-, data- and context-parallel ranks (Megatron's get_amax_reduction_group), or over
    tensor- and context-parallel ones with `tp_only_amax_red`, which is no flag but a setting of some forks. A custom
    recipe, of all layers or of some, may. The other recipes stay within tensor-parallel ranks.
    """
    delayed_scaling = setting("fp8") and setting("fp8_recipe") in (None, "delayed", "custom")
    return bool((delayed_scaling and not setting("tp_only_amax_red")) or setting("te_precision_config_file"))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Sizes in windows, Megatron's samples.

    window: tokens, --seq-length. schedule: sizes of a global batch over all ranks, by consumed samples. evaluated: size
    of an evaluation iteration over all ranks. micro_batch_size, evaluated_micro_batch_size: the mean, in training and
    in evaluation. stepped: --step-batch-size-schedule gives the sizes. ramp: a --rampup-batch-size, which Megatron
    parses but does not train by, as such a schedule (in tokens).
    """

    window: int
    schedule: BatchSchedule
    evaluated: int
    micro_batch_size: int = 1
    evaluated_micro_batch_size: int = 1
    stepped: bool = False
    ramp: str | None = None

    @classmethod
    def of(cls, args: Any) -> BatchSizes:
        """args: Megatron's validated arguments. WlbError if the flags do not fit together."""
        micro_batch_size = int(getattr(args, "micro_batch_size", None) or 1)
        evaluated_micro_batch_size = int(getattr(args, "eval_micro_batch_size", None) or micro_batch_size)
        evaluated = int(getattr(args, "eval_global_batch_size", None) or args.global_batch_size)
        if _decreased(args):
            evaluated -= evaluated % (args.data_parallel_size * evaluated_micro_batch_size)
        stepped = getattr(args, "step_batch_size_schedule", None) is not None
        schedule, ramp = _schedule(args, micro_batch_size), None
        if not stepped and getattr(args, "rampup_batch_size", None) is not None:
            ramp = " ".join(f"{samples * args.seq_length}:{size}" for samples, size in schedule.steps)
        return cls(
            window=args.seq_length,
            schedule=schedule,
            evaluated=evaluated,
            micro_batch_size=micro_batch_size,
            evaluated_micro_batch_size=evaluated_micro_batch_size,
            stepped=stepped,
            ramp=ramp,
        )

    @property
    def joined_window(self) -> int:
        """Tokens of a micro-batch in the mean."""
        return self.window * self.micro_batch_size

    @property
    def evaluated_window(self) -> int:
        """The same in evaluation."""
        return self.window * self.evaluated_micro_batch_size


def _schedule(args: Any, micro_batch_size: int) -> BatchSchedule:
    text, ramp = (getattr(args, name, None) for name in ("step_batch_size_schedule", "rampup_batch_size"))
    size = args.global_batch_size
    if _decreased(args):
        if text is not None or ramp is not None:
            raise WlbError(
                "--decrease-batch-size-if-needed cannot be combined with batches that grow by "
                "--step-batch-size-schedule (Megatron trains --rampup-batch-size as one, too): give sizes that the "
                "data-parallel size divides"
            )
        multiple = args.data_parallel_size * micro_batch_size
        if size < multiple:
            raise WlbError(f"a global batch of {size} cannot be decreased to a multiple of {multiple}")
        return BatchSchedule.constant(size - size % multiple)
    if text is not None:
        return BatchSchedule(_steps(text, args.seq_length))
    if ramp is not None:
        start, increment, samples = (int(value) for value in ramp)
        return linear_ramp(start, increment, samples, size)
    return BatchSchedule.constant(size)


def _decreased(args: Any) -> bool:
    """Whether sizes that data-parallel ranks do not divide are rounded down, as Megatron does."""
    return bool(getattr(args, "decrease_batch_size_if_needed", False))


def plan_decides(config: WlbConfig, *, evaluation: bool = False) -> bool:
    """Whether the plan makes as many micro-batches of a rank's windows as the interleaved schedule takes, whatever
    their number. Evaluation is packed by varlen and by fixed groups whatever trains."""
    return evaluation or (not config.fixed_windows and config.cp_mode == "fixed")


def misfit(size: int, sizes: Layout, micro_batch_size: int = 1, *, by_plan: bool = False) -> str | None:
    """Why Megatron cannot train a global batch of `size` windows in this layout; None if it can.

    micro_batch_size: windows. by_plan: see plan_decides.
    """
    ranks, stages = sizes.data, sizes.pipeline
    if size % (ranks * micro_batch_size):
        of = f"the data-parallel size {ranks}" + (
            f" x {micro_batch_size} windows of a micro-batch" if micro_batch_size > 1 else ""
        )
        return f"a global batch of {size} is not a multiple of {of}: change one of them"
    if sizes.virtual == 1:
        return None
    group = sizes.micro_step_multiple
    if group < stages:
        return f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below the {stages} pipeline stages"
    count = size // (ranks * micro_batch_size)
    if by_plan or _interleaves(count, group, stages):
        return None
    next_one = next(number for number in itertools.count(count) if _interleaves(number, group, stages))
    return (
        f"a global batch of {size} gives each data-parallel rank {count} micro-batches. Virtual pipeline stages take "
        f"them in groups of {group}, and the last group must have {stages} or more: "
        f"{next_one * ranks * micro_batch_size} would do"
    )


def _interleaves(micro_batches: int, group: int, stages: int) -> bool:
    """Whether Megatron's interleaved schedule takes so many micro-batches, by groups of `group`."""
    return micro_batches >= group and not 0 < micro_batches % group < stages


def _steps(text: str, window: int) -> tuple[tuple[int, int], ...]:
    """Megatron's own reading of the schedule: (samples, size)."""
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    try:
        calculator = StepBatchsizeNumMicroBatchesCalculator(
            micro_batch_size=1,
            data_parallel_size=1,
            decrease_batch_size_if_needed=False,
            rank=1,
            schedule=text,
            seq_length=window,
        )
    except (AssertionError, ValueError) as error:
        raise WlbError(f"--step-batch-size-schedule {text!r}: {error}") from None
    return tuple((int(samples), int(size)) for samples, size in calculator.schedule)
