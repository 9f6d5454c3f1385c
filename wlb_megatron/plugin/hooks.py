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
    deferred_losses,
    grouped_steps,
    losses,
    multi_token,
    pipeline_shapes,
)


@dataclass(frozen=True, slots=True)
class Hook:
    """`place`: "module:attribute" or "module:Class.attribute". `takes`: parameters that `wrap` relies on."""

    place: str
    takes: tuple[str, ...]
    why: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    before: tuple[int, int] | None = None
    """Only for releases before this one (major, minor)."""
    since: tuple[int, int] = (0, 0)
    """Only for releases from this one on."""
    optional: bool = False
    """Left as it is where this Megatron has another form of it. What needs it is then refused by flag."""
    always: bool = False
    """Also with --wlb-off, with which the others do what the original does."""


def _wrap_flops(original: Callable[..., Any]) -> Callable[..., Any]:
    from wlb_megatron.plugin.logs import flops

    return flops.wrap_num_floating_point_operations(original)


def _wrap_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    from wlb_megatron.plugin.logs import flops, metrics, timers

    logged = resume.wrap_training_log(flops.wrap_training_log(original))
    return metrics.wrap_training_log(timers.wrap_training_log(logged))


def _wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    return grouped_steps.wrap_forward_step(trace.wrap_forward_step(original))


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    return grouped_steps.wrap_backward_step(
        trace.wrap_backward_step(deferred_losses.wrap_backward_step(original))
    )


HOOKS: tuple[Hook, ...] = (
    Hook(
        "megatron.training.arguments:parse_args",
        ("extra_args_provider", "ignore_unknown_args"),
        "adds the --wlb-* flags",
        take_over.wrap_parse_args,
        always=True,
    ),
    Hook(
        "megatron.training.arguments:validate_args",
        ("args", "defaults"),
        "refuses what is not handled, opens the corpus, sets what the plugin needs",
        take_over.wrap_validate_args,
        always=True,
    ),
    Hook(
        "megatron.training.training:pretrain",
        ("train_valid_test_dataset_provider", "model_provider", "forward_step_func"),
        "gives pretrain() the plugin's dataset provider, forward step and layer spec",
        hand_over.wrap_pretrain,
    ),
    Hook(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        ("config", "transformer_layer_spec", "mtp_block_spec"),
        "gives the plugin's core attention to what a script's model_provider builds, and to multi-token prediction",
        spec.wrap_model,
    ),
    Hook(
        "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
        ("config", "hybrid_stack_spec"),
        "gives the plugin's core attention to what a script's model_provider builds",
        spec.wrap_model,
        since=(0, 18),
    ),
    Hook(
        "megatron.core.models.hybrid.hybrid_model:HybridModel.forward",
        ("decoder_input", "labels", "packed_seq_params", "padding_mask"),
        "leaves output layer and loss to right before a micro-batch's backward where documents are in chunks",
        deferred_losses.wrap_hybrid_forward,
        since=(0, 18),
    ),
    Hook(
        "megatron.core.ssm.gated_delta_net:GatedDeltaNet.__init__",
        ("submodules", "pg_collection"),
        "takes --cp-comm-type, which 0.18 gives to every attention, and leaves it",
        delta_nets.wrap_init,
        since=(0, 18),
        before=(0, 19),
    ),
    Hook(
        "megatron.core.ssm.gated_delta_net:GatedDeltaNet.forward",
        ("hidden_states", "packed_seq_params"),
        "gives gated delta nets the documents of their micro-batch",
        delta_nets.wrap_layer,
        since=(0, 18),
    ),
    Hook(
        "megatron.core.ssm.gated_delta_net.common:_GDNBase._gated_norm_and_a2a",
        ("packed_seq_params",),
        "the same where their norm is recomputed",
        delta_nets.wrap_layer,
        since=(0, 19),
        optional=True,
    ),
    Hook(
        "megatron.core.ssm.mamba_context_parallel:_undo_attention_load_balancing",
        (),
        "puts tokens of all context-parallel ranks into the documents' order, by the plan",
        delta_nets.wrap_undo,
        since=(0, 18),
    ),
    Hook(
        "megatron.core.ssm.mamba_context_parallel:_redo_attention_load_balancing",
        (),
        "and back",
        delta_nets.wrap_redo,
        since=(0, 18),
    ),
    Hook(
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
        ("hidden_states", "labels"),
        "leaves output layer and loss to right before a micro-batch's backward where documents are in chunks",
        deferred_losses.wrap_postprocess,
    ),
    Hook(
        "megatron.training.training:get_forward_backward_func",
        (),
        "draws the step's micro-batches first, so that every pipeline stage knows their shapes",
        pipeline_shapes.wrap_get_forward_backward_func,
    ),
    Hook(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
        "answers with the shapes known from the plan: no exchange, no device synchronisation",
        pipeline_shapes.wrap_communicate_shapes,
    ),
    Hook(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.send_forward_recv_forward",
        (),
        "waits until an output is sent before Megatron frees it, as Megatron does from 0.18",
        pipeline_shapes.wrap_send_forward_recv_forward,
        before=(0, 18),
    ),
    Hook(
        "megatron.training.training:training_log",
        ("iteration", "skipped_iter"),
        "keeps the packing state for the next checkpoint; reports the plugin's figures after each iteration, its "
        "timers among Megatron's, and throughput over all iterations since the last line",
        _wrap_training_log,
    ),
    Hook(
        "megatron.training.training:dummy_train_step",
        ("data_iterator",),
        "with --iterations-to-skip draws the planned micro-batches of an iteration that is not trained",
        iterators.wrap_dummy_train_step,
    ),
    Hook(
        "megatron.training.training:evaluate",
        ("data_iterator", "eval_iters"),
        "with --full-validation evaluates each set once, whatever --eval-iters is",
        iterators.wrap_evaluate,
    ),
    Hook(
        "megatron.training.training:cyclic_iter",
        (),
        "leaves the plugin's iterator over a validation set as it is: it begins again by itself",
        iterators.wrap_cyclic_iter,
    ),
    Hook(
        "megatron.core.pipeline_parallel.schedules:forward_step",
        ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor"),
        "keeps a micro-batch's tensors where documents are in chunks; marks its forward for --wlb-trace",
        _wrap_forward,
    ),
    Hook(
        "megatron.core.pipeline_parallel.schedules:backward_step",
        ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
        "runs a document's last chunk first; marks a micro-batch's backward for --wlb-trace",
        _wrap_backward,
    ),
    Hook(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.total_stages",
        ("self",),
        "more forwards run ahead in a step with documents in chunks",
        grouped_steps.wrap_total_stages,
        since=(0, 17),
    ),
    Hook(
        "megatron.core.pipeline_parallel.schedules:get_pp_rank_microbatches",
        ("num_microbatches", "num_model_chunks"),
        "the same over several model chunks a stage",
        grouped_steps.wrap_get_pp_rank_microbatches,
        since=(0, 17),
    ),
    Hook(
        "megatron.core.pipeline_parallel.schedules:get_schedule_table",
        ("num_microbatches", "num_model_chunks"),
        "blocks of micro-batches that pass a model chunk hold whole documents in chunks",
        grouped_steps.wrap_get_schedule_table,
        since=(0, 17),
    ),
    Hook(
        "megatron.training.checkpointing:generate_state_dict",
        ("args",),
        "puts the packing state into the arguments that a checkpoint holds",
        resume.wrap_generate_state_dict,
    ),
    Hook(
        "megatron.training.checkpointing:_load_base_checkpoint",
        ("load_dir", "args"),
        "reads the packing state that the checkpoint's arguments hold",
        resume.wrap_load_base_checkpoint,
    ),
    Hook(
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict",
        ("state_dict",),
        "refuses a checkpoint of another learning rate, or batch size, with one line",
        resume.wrap_load_scheduler,
    ),
    Hook(
        "megatron.core.datasets.utils:compile_helpers",
        (),
        "builds no dataset helpers: documents come from the index, Megatron's samples are not built",
        hand_over.wrap_compile_helpers,
        always=True,  # a wheel brings them built, and nothing to build them with
    ),
    Hook(
        "megatron.core.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel.scale_gradients",
        ("scaling_factor",),
        "divides FSDP2's gradients by tokens, where Megatron does nothing",
        losses.wrap_scale_gradients,
    ),
    Hook(
        "megatron.core.pipeline_parallel.fine_grained_activation_offload:OffloadTensorGroup.__init__",
        (),
        "takes no pinned memory that is kept for every shape: lengths vary without end",
        grouped_steps.wrap_offload_group,
    ),
    Hook(
        "megatron.core.pipeline_parallel.fine_grained_activation_offload:ChunkOffloadHandler.on_group_commit_backward",
        ("self", "name"),
        "reloads offloaded activations in the order of the backwards where documents are in chunks",
        grouped_steps.wrap_commit_backward,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:roll_tensor",
        ("tensor", "shifts", "dims", "cp_group", "packed_seq_params"),
        "takes the next token of a document by the plan, wherever it is held",
        multi_token.wrap_roll_tensor,
        optional=True,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:roll_tensor",
        ("tensors", "shifts", "dims", "cp_group", "packed_seq_params"),
        "takes the next token of a document by the plan, wherever it is held",
        multi_token.wrap_roll_tensors,
        optional=True,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.forward",
        ("input_ids", "packed_seq_params"),
        "keeps keys of documents in chunks apart where one layer predicts several tokens",
        multi_token.wrap_layer_forward,
        since=(0, 17),
    ),
    Hook(
        "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear",
        ("module",),
        "lets multi-token prediction run without Transformer Engine, on which this question fails then",
        multi_token.wrap_is_inference_linear,
        since=(0, 20),
        optional=True,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.track_mtp_metrics",
        ("loss_scale",),
        "logs losses of multi-token prediction as means over the planned micro-batches",
        multi_token.wrap_track_metrics,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.save_metrics_to_tracker",
        ("loss", "avg_group"),
        "weighs losses of multi-token prediction by the tokens that they are means of, for the log",
        logged_losses.wrap_save,
        since=(0, 19),
        optional=True,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.save_loss_to_tracker",
        ("loss", "avg_group"),
        "weighs losses of multi-token prediction by the tokens that they are means of, for the log",
        logged_losses.wrap_save,
        before=(0, 19),
    ),
    Hook(
        "megatron.core.transformer.moe.router:TopKRouter.apply_z_loss",
        ("logits", "padding_mask"),
        "notes how many tokens a router's z-loss is a mean of",
        logged_losses.wrap_apply_z_loss,
    ),
    Hook(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.record",
        ("name", "value", "layer_number", "num_layers", "avg_group"),
        "logs z-losses as means over the tokens of all ranks",
        logged_losses.wrap_record,
        since=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_utils:save_to_aux_losses_tracker",
        ("name", "loss", "layer_number", "num_layers", "avg_group"),
        "logs z-losses as means over the tokens of all ranks",
        logged_losses.wrap_record,
        before=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.ensure_initialized",
        ("name", "num_layers"),
        "sums routers' losses over all ranks where the last pipeline stage has no experts",
        logged_losses.wrap_ensure_initialized,
        since=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_utils:reduce_aux_losses_tracker_across_ranks",
        ("track_names",),
        "sums routers' losses over all ranks where the last pipeline stage has no experts",
        logged_losses.wrap_reduce,
        before=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.report",
        ("loss_scale",),
        "logs routers' losses as means over the planned micro-batches",
        logged_losses.wrap_report,
        since=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_utils:track_moe_metrics",
        ("loss_scale",),
        "logs routers' losses as means over the planned micro-batches",
        logged_losses.wrap_report,
        before=(0, 18),
    ),
    Hook(
        "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
        ("routing_map", "reduce_group", "topk", "with_padding_mask"),
        "experts' balancing losses weigh all ranks alike where one holds the padding",
        routing.wrap_token_counts,
    ),
    Hook(
        "megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
        ("probs", "scores_for_aux_loss", "routing_map"),
        "takes experts' balancing loss of a sequence of each document, wherever its tokens are held",
        document_balance.wrap_apply_seq_aux_loss,
    ),
    Hook(
        "megatron.core.transformer.moe.router:TopKRouter.routing",
        ("logits", "padding_mask"),
        "counts the routes of documents in chunks in a forward that will be recomputed",
        document_balance.wrap_routing,
    ),
    Hook(
        "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
        ("routing_map", "padding_mask"),
        "experts' biases leave out padding, on which Megatron up to 0.19 fails",
        routing.wrap_apply_expert_bias,
    ),
    Hook(
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale",
        ("scale",),
        "gives routers' losses their strength under tensor and context parallelism, as Megatron does from 0.19",
        routing.wrap_set_loss_scale,
        before=(0, 19),
    ),
    Hook(
        "megatron.training.training:num_floating_point_operations",
        ("args", "batch_size"),
        "counts FLOPs of the documents trained; from 0.18 Megatron can itself",
        _wrap_flops,
        before=(0, 18),
    ),
)
