"""A TrainingJob as Megatron's flags would give it, for tests of what depends on it."""

import argparse
from typing import Any

import torch

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.limits import Trainer
from wlb_megatron.plugin.flags.training_job import TrainingJob, trainer_of

VALIDATED: dict[str, Any] = {
    **{"num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 5632, "num_attention_heads": 16},
    **{"group_query_attention": True, "num_query_groups": 4, "kv_channels": 128, "swiglu": True},
    **{"padded_vocab_size": None, "vocab_size": 257, "max_position_embeddings": 65536, "num_experts": None},
    **{"untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0, "params_dtype": torch.bfloat16},
    **{"moe_router_load_balancing_type": "aux_loss", "moe_ffn_hidden_size": None, "moe_router_topk": 2},
    **{"transformer_impl": "transformer_engine", "distributed_backend": "nccl", "local_rank": 0, "rank": 0},
    **{"tensor_model_parallel_size": 1, "context_parallel_size": 1, "pipeline_model_parallel_size": 1},
    **{"virtual_pipeline_model_parallel_size": None, "data_parallel_size": 1, "sequence_parallel": False},
    **{"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None},
    **{"seq_length": 32768, "global_batch_size": 4, "eval_iters": 0, "multiple_validation_sets": False},
    **{"data_path": ["corpus"], "data_args_path": None, "per_split_data_args_path": None, "split": None},
    **{"train_data_path": None, "valid_data_path": None, "test_data_path": None},
    **{"seed": 1234, "num_workers": 2, "exit_signal": 15, "exit_signal_handler": False},
    **{"use_distributed_optimizer": True, "recompute_granularity": None, "recompute_num_layers": None},
    **{"recompute_method": None, "distributed_timeout_minutes": 10, "qk_layernorm": False},
}
"""Megatron's validated arguments of 8 layers of 2048 at a window of 32K on one GPU, as far as they are read."""


def trainer_with(**flags: Any) -> Trainer:
    """What the trainer of these flags can do, on four pipeline stages unless they say otherwise."""
    return trainer_of(argparse.Namespace(**VALIDATED | {"pipeline_model_parallel_size": 4} | flags))


def training_job(**flags: Any) -> TrainingJob:
    """The job with other flags; those that begin with wlb_ are the plugin's."""
    ours = {name.removeprefix("wlb_"): flags.pop(name) for name in [*flags] if name.startswith("wlb_")}
    return TrainingJob.of(argparse.Namespace(**(VALIDATED | flags)), WlbConfig(**ours))
