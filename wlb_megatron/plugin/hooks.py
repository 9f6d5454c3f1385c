"""The seams: every Megatron symbol that the plugin replaces, in one table. install.py does it.

A replacement is a wrapper that gets the original; it holds no copy of Megatron's logic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wlb_megatron.plugin import hand_over, take_over
from wlb_megatron.plugin.logs import logged_losses, trace
from wlb_megatron.plugin.micro_batches import iterators
from wlb_megatron.plugin.model import delta_nets, document_balance, routing, spec
from wlb_megatron.plugin.plans import resume
from wlb_megatron.plugin.step import (
    grouped_steps,
    losses,
    multi_token,
    pipeline_shapes,
)


@dataclass(frozen=True, slots=True)
class Hook:
    """One replacement. What it does, and why, is what the docstring of `wrap` begins with.

    place: "module:attribute" or "module:Class.attribute". takes: parameters that `wrap` relies on.
    """

    place: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    takes: tuple[str, ...] = ()
    before: tuple[int, int] | None = None
    """Only for releases before this one (major, minor)."""
    since: tuple[int, int] = (0, 0)
    """Only for releases from this one on."""
    optional: bool = False
    """Left as it is where this Megatron has another form of it. What needs it is then refused by flag."""
    always: bool = False
    """Also with --wlb-off, with which the others do what the original does."""


def _wrap_flops(original: Callable[..., Any]) -> Callable[..., Any]:
    """num_floating_point_operations of the documents trained; from 0.18 Megatron can count them itself."""
    from wlb_megatron.plugin.logs import flops

    return flops.wrap_num_floating_point_operations(original)


def _wrap_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """training_log, which keeps the packing state for the next checkpoint, reports the plugin's figures and timers, and
    throughput over all iterations since the last line."""
    from wlb_megatron.plugin.logs import flops, metrics, timers

    logged = resume.wrap_training_log(flops.wrap_training_log(original))
    return metrics.wrap_training_log(timers.wrap_training_log(logged))


def _wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule's forward of a micro-batch: keeps its tensors in a step in groups, and marks it for --wlb-trace."""
    return grouped_steps.wrap_forward_step(trace.wrap_forward_step(original))


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule's backward: a document's last chunk first, beginning with its loss; marked for --wlb-trace."""
    return grouped_steps.wrap_backward_step(trace.wrap_backward_step(losses.wrap_backward_step(original)))


HOOKS: tuple[Hook, ...] = (
    Hook(
        "megatron.training.arguments:parse_args",
        take_over.wrap_parse_args,
        ("extra_args_provider", "ignore_unknown_args"),
        always=True,
    ),
    Hook(
        "megatron.training.arguments:validate_args",
        take_over.wrap_validate_args,
        ("args", "defaults"),
        always=True,
    ),
    Hook(
        "megatron.training.training:pretrain",
        hand_over.wrap_pretrain,
        ("train_valid_test_dataset_provider", "model_provider", "forward_step_func"),
    ),
    Hook(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        spec.wrap_model,
        ("config", "transformer_layer_spec", "mtp_block_spec"),
    ),
    Hook(
        "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
        spec.wrap_model,
        ("config", "hybrid_stack_spec"),
        since=(0, 18),
    ),
    Hook(
        "megatron.core.models.hybrid.hybrid_model:HybridModel.forward",
        losses.wrap_hybrid_forward,
        ("decoder_input", "labels", "packed_seq_params", "padding_mask"),
        since=(0, 18),
    ),
    Hook(
        "megatron.core.ssm.gated_delta_net:GatedDeltaNet.__init__",
        delta_nets.wrap_init,
        ("submodules", "pg_collection"),
        since=(0, 18),
        before=(0, 19),
    ),
    Hook(
        "megatron.core.ssm.gated_delta_net:GatedDeltaNet.forward",
        delta_nets.wrap_layer,
        ("hidden_states", "packed_seq_params"),
        since=(0, 18),
    ),
    Hook(
        "megatron.core.ssm.gated_delta_net.common:_GDNBase._gated_norm_and_a2a",
        delta_nets.wrap_layer,
        ("packed_seq_params",),
        since=(0, 19),
        optional=True,
    ),
    Hook(
        "megatron.core.ssm.mamba_context_parallel:_undo_attention_load_balancing",
        delta_nets.wrap_undo,
        since=(0, 18),
    ),
    Hook(
        "megatron.core.ssm.mamba_context_parallel:_redo_attention_load_balancing",
        delta_nets.wrap_redo,
        since=(0, 18),
    ),
    Hook(
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
        losses.wrap_postprocess,
        ("hidden_states", "labels"),
    ),
    Hook(
        "megatron.training.training:get_forward_backward_func", pipeline_shapes.wrap_get_forward_backward_func
    ),
    Hook(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        pipeline_shapes.wrap_communicate_shapes,
        ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
    ),
    Hook(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.send_forward_recv_forward",
        pipeline_shapes.wrap_send_forward_recv_forward,
        before=(0, 18),
    ),
    Hook("megatron.training.training:training_log", _wrap_training_log, ("iteration", "skipped_iter")),
    Hook("megatron.training.training:dummy_train_step", iterators.wrap_dummy_train_step, ("data_iterator",)),
    Hook("megatron.training.training:evaluate", iterators.wrap_evaluate, ("data_iterator", "eval_iters")),
    Hook("megatron.training.training:cyclic_iter", iterators.wrap_cyclic_iter),
    Hook(
        "megatron.core.pipeline_parallel.schedules:forward_step",
        _wrap_forward,
        ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor"),
    ),
    Hook(
        "megatron.core.pipeline_parallel.schedules:backward_step",
        _wrap_backward,
        ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
    ),
    Hook(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.total_stages",
        grouped_steps.wrap_total_stages,
        ("self",),
        since=(0, 17),
    ),
    Hook(
        "megatron.core.pipeline_parallel.schedules:get_pp_rank_microbatches",
        grouped_steps.wrap_get_pp_rank_microbatches,
        ("num_microbatches", "num_model_chunks"),
        since=(0, 17),
    ),
    Hook(
        "megatron.core.pipeline_parallel.schedules:get_schedule_table",
        grouped_steps.wrap_get_schedule_table,
        ("num_microbatches", "num_model_chunks"),
        since=(0, 17),
    ),
    Hook("megatron.training.checkpointing:generate_state_dict", resume.wrap_generate_state_dict, ("args",)),
    Hook(
        "megatron.training.checkpointing:_load_base_checkpoint",
        resume.wrap_load_base_checkpoint,
        ("load_dir", "args"),
    ),
    Hook(
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict",
        resume.wrap_load_scheduler,
        ("state_dict",),
    ),
    # A wheel brings the helpers built, and nothing to build them with.
    Hook("megatron.core.datasets.utils:compile_helpers", hand_over.wrap_compile_helpers, always=True),
    Hook(
        "megatron.core.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel.scale_gradients",
        losses.wrap_scale_gradients,
        ("scaling_factor",),
    ),
    Hook(
        "megatron.core.pipeline_parallel.fine_grained_activation_offload:OffloadTensorGroup.__init__",
        grouped_steps.wrap_offload_group,
    ),
    Hook(
        "megatron.core.pipeline_parallel.fine_grained_activation_offload:ChunkOffloadHandler.on_group_commit_backward",
        grouped_steps.wrap_commit_backward,
        ("self", "name"),
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:roll_tensor",
        multi_token.wrap_roll_tensor,
        ("shifts", "dims", "cp_group", "packed_seq_params"),
        optional=True,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.forward",
        multi_token.wrap_layer_forward,
        ("input_ids", "packed_seq_params"),
        since=(0, 17),
    ),
    Hook(
        "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear",
        multi_token.wrap_is_inference_linear,
        ("module",),
        since=(0, 20),
        optional=True,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.track_mtp_metrics",
        multi_token.wrap_track_metrics,
        ("loss_scale",),
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.save_metrics_to_tracker",
        logged_losses.wrap_save,
        ("loss", "avg_group"),
        since=(0, 19),
        optional=True,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.save_loss_to_tracker",
        logged_losses.wrap_save,
        ("loss", "avg_group"),
        before=(0, 19),
    ),
    Hook(
        "megatron.core.transformer.moe.router:TopKRouter.apply_z_loss",
        logged_losses.wrap_apply_z_loss,
        ("logits", "padding_mask"),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.record",
        logged_losses.wrap_record,
        ("name", "value", "layer_number", "num_layers", "avg_group"),
        since=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_utils:save_to_aux_losses_tracker",
        logged_losses.wrap_record,
        ("name", "loss", "layer_number", "num_layers", "avg_group"),
        before=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.ensure_initialized",
        logged_losses.wrap_ensure_initialized,
        ("name", "num_layers"),
        since=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_utils:reduce_aux_losses_tracker_across_ranks",
        logged_losses.wrap_reduce,
        ("track_names",),
        before=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.report",
        logged_losses.wrap_report,
        ("loss_scale",),
        since=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_utils:track_moe_metrics",
        logged_losses.wrap_report,
        ("loss_scale",),
        before=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
        routing.wrap_token_counts,
        ("routing_map", "reduce_group", "topk", "with_padding_mask"),
    ),
    Hook(
        "megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
        document_balance.wrap_apply_seq_aux_loss,
        ("probs", "scores_for_aux_loss", "routing_map"),
    ),
    Hook(
        "megatron.core.transformer.moe.router:TopKRouter.routing",
        document_balance.wrap_routing,
        ("logits", "padding_mask"),
    ),
    Hook(
        "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
        routing.wrap_apply_expert_bias,
        ("routing_map", "padding_mask"),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale",
        routing.wrap_set_loss_scale,
        ("scale",),
        before=(0, 19),
    ),
    Hook(
        "megatron.training.training:num_floating_point_operations",
        _wrap_flops,
        ("args", "batch_size"),
        before=(0, 18),
    ),
)
