"""How many ways Megatron's flags split the job."""

from __future__ import annotations

from typing import Any

from wlb_megatron.workload.memory import Layout


def layout_of(args: Any) -> Layout:
    """args: Megatron's validated arguments. What memory alone depends on is in MemoryFlags."""
    return Layout(
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
    )
