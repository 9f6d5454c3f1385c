"""How many ways Megatron's flags split the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Ranks of each kind; `virtual`: model chunks of a pipeline stage.

    group: --microbatch-group-size-per-virtual-pipeline-stage, None for as many as there are stages. sequence: whether
    tensor-parallel ranks share a micro-batch's tokens between attention and MLP.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    virtual: int = 1
    group: int | None = None
    sequence: bool = False

    @classmethod
    def of(cls, args: Any) -> RankCounts:
        """args: Megatron's validated arguments."""
        return cls(
            tensor=args.tensor_model_parallel_size,
            context=args.context_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            data=args.data_parallel_size,
            virtual=args.virtual_pipeline_model_parallel_size or 1,
            group=getattr(args, "microbatch_group_size_per_vp_stage", None),
            sequence=args.sequence_parallel,
        )

    @property
    def micro_step_multiple(self) -> int:
        """The interleaved schedule takes micro-batches by groups of this many; 1F1B any number."""
        return 1 if self.virtual == 1 else self.group or self.pipeline
