"""The dataset provider that Megatron calls on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wlb_megatron.plugin.data import Layout, make_iterator
from wlb_megatron.plugin.source import Source, token_alignment
from wlb_megatron.refusals import Refused


def make_provider(source: Source) -> Callable[..., tuple[Any, None, None]]:
    """train_valid_test_datasets_provider over the source's plan; validation and test are refused elsewhere."""

    def provider(train_valid_test_num_samples: Any, vp_stage: int | None = None) -> tuple[Any, None, None]:
        from megatron.core import parallel_state
        from megatron.training import get_args, print_rank_0

        args = get_args()
        if args.iteration > 0:
            raise Refused(
                f"wlb_megatron: the checkpoint is of iteration {args.iteration}, and resuming the packing state is "
                "not built yet: a silent replay of documents is the alternative. Use --finetune to start the "
                "document order anew from its weights."
            )
        layout = Layout(
            cp_size=args.context_parallel_size,
            cp_rank=parallel_state.get_context_parallel_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            alignment=token_alignment(args),
            activation_divisor=args.tensor_model_parallel_size if args.sequence_parallel else 1,
            hidden_size=args.hidden_size,
            reads_tokens=parallel_state.is_pipeline_first_stage(ignore_virtual=True)
            or parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        )
        config = source.config
        print_rank_0(
            f"> wlb_megatron: {source.corpus.first_ids[-1]:,} documents, packing {config.packing}, sharding "
            f"{config.sharding}, attention equals the rest at {config.quadratic_at:.0f} tokens"
        )
        iterator = make_iterator(
            source.corpus,
            source.planner,
            config.sharding,
            layout,
            workers=args.num_workers,
            micro_batches=source.micro_batches,
            pin_memory=args.distributed_backend == "nccl",
        )
        return iterator, None, None

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider
