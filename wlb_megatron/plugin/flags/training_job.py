"""A job as Megatron's validated flags describe it, read once: the only form in which plans and logs know them.

What changes after the flags are checked (the iteration, samples consumed, the number of micro-batches) is not in it.
Who needs that reads it from Megatron where it stands, and hands it on as a value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.chunks.chunk_limits import Trainer
from wlb_megatron.plugin.flags.batch_sizes import BatchSizes
from wlb_megatron.plugin.flags.data_paths import DataPaths, FineTuning
from wlb_megatron.plugin.flags.job_profile import profile_of
from wlb_megatron.plugin.flags.memory_flags import MemoryFlags
from wlb_megatron.plugin.flags.rank_counts import layout_of
from wlb_megatron.plugin.flags.trained_model import TrainedModel, layer_kinds
from wlb_megatron.plugin.flags.trainer import trainer_of
from wlb_megatron.refusals import one_length
from wlb_megatron.sharding.alignment import multiple
from wlb_megatron.workload.costs import Costs
from wlb_megatron.workload.memory import Layout
from wlb_megatron.workload.profile import Profile


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
        memory: None if it is not looked at, without a GPU and without a flag that names its memory.
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
    memory: MemoryFlags | None
    profile: Profile | None
    trains: bool
    seed: int
    workers: int
    ignored_signal: int | None
    recompute: str
    recompute_blocks: int | None
    one_length: bool
    timeout: int
    fine_tuning: FineTuning | None = None

    @classmethod
    def of(cls, args: Any, settings: WlbConfig, *, full_validation: bool = False) -> TrainingJob:
        """args: Megatron's validated arguments; what a release does not know is taken as not given. full_validation: as
        the user gave it.

        WlbError where flags do not fit together or a file that one names cannot be read.
        """
        model, sizes = TrainedModel.of(args), layout_of(args)
        device = RankDevice(
            on_gpu=args.distributed_backend == "nccl", index=args.local_rank, rank=getattr(args, "rank", 0)
        )
        return cls(
            given=settings,
            config=settings,
            model=model,
            sizes=sizes,
            batches=BatchSizes.of(args),
            data=DataPaths.of(args),
            trainer=trainer_of(args),
            evaluation=Evaluation(
                iterations=args.eval_iters or 0,
                full=full_validation,
                each_set=args.multiple_validation_sets,
                names=tuple(getattr(args, "validation_set_names", None) or ()),
            ),
            device=device,
            memory=MemoryFlags.of(args) if device.on_gpu or settings.gpu_memory else None,
            profile=profile_of(settings.profile, model, sizes.tensor),
            trains=not getattr(args, "skip_train", False),
            seed=args.seed,
            workers=args.num_workers,
            ignored_signal=int(args.exit_signal) if args.exit_signal_handler else None,
            recompute=args.recompute_granularity or "none",
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
        if self.recompute != "full":
            return 0.0
        chunk = self.model.layers / (self.sizes.pipeline * self.sizes.virtual)
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

    def with_config(self, config: WlbConfig) -> TrainingJob:
        """The same with these settings."""
        return replace(self, config=config)

    def with_vocabulary(self, rows: int) -> TrainingJob:
        """The same once the tokenizer is built, which Megatron does after the flags are checked."""
        return replace(self, model=replace(self.model, vocabulary=rows))


def _recomputed_blocks(args: Any) -> int | None:
    if args.recompute_method != "block":
        return None
    return max(1, (args.recompute_num_layers or 1) * layer_kinds(args)[0] // args.num_layers)
