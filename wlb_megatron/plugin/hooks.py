"""The seams: every Megatron symbol that the plugin replaces, in one table, and how they are replaced.

A replacement is a wrapper that gets the original; it holds no copy of Megatron's logic. Modules that took the original
by name (`from .training import pretrain`) get the replacement as well, so it does not matter when the hooks are
installed; installing twice does nothing the second time. A symbol that is missing, or does not take a parameter that
its wrapper relies on, is an error that names both and the version.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from wlb_megatron.plugin import take_over
from wlb_megatron.plugin.flags.versions import megatron_version, tried_versions
from wlb_megatron.plugin.job_state import Original
from wlb_megatron.plugin.logs import logged_losses, trace
from wlb_megatron.plugin.micro_batches import iterators
from wlb_megatron.plugin.model import delta_nets, routing, spec
from wlb_megatron.plugin.plans import resume
from wlb_megatron.plugin.step import (
    grouped_steps,
    losses,
    multi_token,
    pipeline_shapes,
)
from wlb_megatron.plugin.take_over import is_off
from wlb_megatron.refusals import Refused


@dataclass(frozen=True, slots=True)
class Hook:
    """One replacement. What it does, and why, is what the docstring of `wrap` begins with. `wrap` is called in place of
    the symbol, with that and its arguments.

    place: "module:attribute" or "module:Class.attribute". takes: parameters that `wrap` relies on.
    """

    place: str
    wrap: Callable[..., Any]
    takes: tuple[str, ...] = ()
    before: tuple[int, int] | None = None
    """Only for releases before this one (major, minor)."""
    optional: bool = False
    """Left out where this Megatron has none, or another form of it. What needs it is then refused by flag."""
    always: bool = False
    """Also with --wlb-off, with which the others do what the original does."""


def _wrap_training_log(original: Original, *args: Any, **kwargs: Any) -> Any:
    """training_log, which keeps the packing state for the next checkpoint, reports the plugin's figures and timers, and
    throughput over all iterations since the last line."""
    from wlb_megatron.plugin.logs import flops, metrics, timers

    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    timers.continue_lists()
    resume.note_applied()
    flops.take_mean(arguments)
    result = original(**arguments)
    metrics.report_iteration(arguments["skipped_iter"])
    return result


def _wrap_forward(original: Original, *args: Any, **kwargs: Any) -> Any:
    """A schedule's forward of a micro-batch: keeps its tensors in a step in groups, and marks it for --wlb-trace."""
    return grouped_steps.wrap_forward_step(partial(trace.wrap_forward_step, original), *args, **kwargs)


def _wrap_backward(original: Original, *args: Any, **kwargs: Any) -> Any:
    """A schedule's backward: a document's last chunk first, beginning with its loss; marked for --wlb-trace."""
    marked = partial(trace.wrap_backward_step, partial(losses.wrap_backward_step, original))
    return grouped_steps.wrap_backward_step(marked, *args, **kwargs)


def hooks_of(module: str, *rows: Hook) -> tuple[Hook, ...]:
    """Rows whose symbols are in one module of Megatron's, by their full places."""
    return tuple(replace(row, place=f"{module}:{row.place}") for row in rows)


HOOKS: tuple[Hook, ...] = (
    *hooks_of(
        "megatron.training.arguments",
        Hook(
            "parse_args",
            take_over.wrap_parse_args,
            ("extra_args_provider", "ignore_unknown_args"),
            always=True,
        ),
        Hook("validate_args", take_over.wrap_validate_args, ("args", "defaults"), always=True),
    ),
    *hooks_of(
        "megatron.training.training",
        Hook(
            "pretrain",
            take_over.wrap_pretrain,
            ("train_valid_test_dataset_provider", "model_provider", "forward_step_func"),
        ),
        Hook("get_forward_backward_func", pipeline_shapes.wrap_get_forward_backward_func),
        Hook("training_log", _wrap_training_log, ("iteration", "skipped_iter")),
        Hook("dummy_train_step", iterators.wrap_dummy_train_step, ("data_iterator",)),
        Hook("evaluate", iterators.wrap_evaluate, ("data_iterator", "eval_iters")),
        Hook("cyclic_iter", iterators.wrap_cyclic_iter),
    ),
    *hooks_of(
        "megatron.core.models.gpt.gpt_model",
        Hook("GPTModel.__init__", spec.wrap_model, ("config", "transformer_layer_spec", "mtp_block_spec")),
        Hook("GPTModel._postprocess", losses.wrap_postprocess, ("hidden_states", "labels")),
    ),
    *hooks_of(
        "megatron.core.models.hybrid.hybrid_model",
        Hook("HybridModel.__init__", spec.wrap_model, ("config", "hybrid_stack_spec")),
        Hook(
            "HybridModel.forward",
            losses.wrap_hybrid_forward,
            ("decoder_input", "labels", "packed_seq_params", "padding_mask"),
        ),
    ),
    *hooks_of(
        "megatron.core.ssm.gated_delta_net",
        Hook("GatedDeltaNet.__init__", delta_nets.wrap_init, ("submodules", "pg_collection"), before=(0, 19)),
        Hook("GatedDeltaNet.forward", delta_nets.wrap_layer, ("hidden_states", "packed_seq_params")),
    ),
    *hooks_of(
        "megatron.core.ssm.gated_delta_net.common",
        Hook(
            "_GDNBase._gated_norm_and_a2a",
            delta_nets.wrap_layer,
            ("packed_seq_params",),
            optional=True,
        ),
    ),
    *hooks_of(
        "megatron.core.ssm.mamba_context_parallel",
        Hook("_undo_attention_load_balancing", delta_nets.wrap_undo),
        Hook("_redo_attention_load_balancing", delta_nets.wrap_redo),
    ),
    *hooks_of(
        "megatron.core.pipeline_parallel.p2p_communication",
        Hook(
            "P2PCommunicator._communicate_shapes",
            pipeline_shapes.wrap_communicate_shapes,
            ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
        ),
        Hook("P2PCommunicator.total_stages", grouped_steps.wrap_total_stages, ("self",)),
    ),
    *hooks_of(
        "megatron.core.pipeline_parallel.schedules",
        Hook(
            "forward_step",
            _wrap_forward,
            ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor"),
        ),
        Hook(
            "backward_step", _wrap_backward, ("input_tensor", "output_tensor", "output_tensor_grad", "config")
        ),
        Hook(
            "get_pp_rank_microbatches",
            grouped_steps.wrap_get_pp_rank_microbatches,
            ("num_microbatches", "num_model_chunks"),
        ),
        Hook(
            "get_schedule_table",
            grouped_steps.wrap_get_schedule_table,
            ("num_microbatches", "num_model_chunks"),
        ),
    ),
    *hooks_of(
        "megatron.training.checkpointing",
        Hook("generate_state_dict", resume.wrap_generate_state_dict, ("args",)),
        Hook("_load_base_checkpoint", resume.wrap_load_base_checkpoint, ("load_dir", "args")),
    ),
    *hooks_of(
        "megatron.core.optimizer_param_scheduler",
        Hook("OptimizerParamScheduler.load_state_dict", resume.wrap_load_scheduler, ("state_dict",)),
    ),
    *hooks_of(
        "megatron.core.datasets.utils",
        # A wheel brings the helpers built, and nothing to build them with.
        Hook("compile_helpers", take_over.wrap_compile_helpers, always=True),
    ),
    *hooks_of(
        "megatron.core.distributed.torch_fully_sharded_data_parallel",
        Hook(
            "TorchFullyShardedDataParallel.scale_gradients", losses.wrap_scale_gradients, ("scaling_factor",)
        ),
    ),
    *hooks_of(
        "megatron.core.pipeline_parallel.fine_grained_activation_offload",
        Hook("OffloadTensorGroup.__init__", grouped_steps.wrap_offload_group),
        Hook(
            "ChunkOffloadHandler.on_group_commit_backward",
            grouped_steps.wrap_commit_backward,
            ("self", "name"),
        ),
    ),
    *hooks_of(
        "megatron.core.transformer.multi_token_prediction",
        Hook(
            "roll_tensor",
            multi_token.wrap_roll_tensor,
            ("shifts", "dims", "cp_group", "packed_seq_params"),
            optional=True,
        ),
        Hook(
            "MultiTokenPredictionLayer.forward",
            multi_token.wrap_layer_forward,
            ("input_ids", "packed_seq_params"),
        ),
        Hook("MTPLossLoggingHelper.track_mtp_metrics", multi_token.wrap_track_metrics, ("loss_scale",)),
        Hook(
            "MTPLossLoggingHelper.save_metrics_to_tracker",
            logged_losses.wrap_save,
            ("loss", "avg_group"),
            optional=True,
        ),
        Hook(
            "MTPLossLoggingHelper.save_loss_to_tracker",
            logged_losses.wrap_save,
            ("loss", "avg_group"),
            before=(0, 19),
        ),
    ),
    *hooks_of(
        "megatron.core.tensor_parallel.inference_layers",
        Hook(
            "is_inference_column_parallel_linear",
            multi_token.wrap_is_inference_linear,
            ("module",),
            optional=True,
        ),
    ),
    *hooks_of(
        "megatron.core.transformer.moe.router",
        Hook("TopKRouter.apply_z_loss", logged_losses.wrap_apply_z_loss, ("logits", "padding_mask")),
        Hook(
            "TopKRouter._apply_seq_aux_loss",
            routing.wrap_apply_seq_aux_loss,
            ("probs", "scores_for_aux_loss", "routing_map"),
        ),
        Hook("TopKRouter.routing", routing.wrap_routing, ("logits", "padding_mask")),
        Hook(
            "TopKRouter._apply_expert_bias", routing.wrap_apply_expert_bias, ("routing_map", "padding_mask")
        ),
    ),
    *hooks_of(
        "megatron.core.transformer.moe.moe_logging",
        Hook(
            "MoEMetricsTracker.record",
            logged_losses.wrap_record,
            ("name", "value", "layer_number", "num_layers", "avg_group"),
        ),
        Hook(
            "MoEMetricsTracker.ensure_initialized",
            logged_losses.wrap_ensure_initialized,
            ("name", "num_layers"),
        ),
        Hook("MoEMetricsTracker.report", logged_losses.wrap_report, ("loss_scale",)),
    ),
    *hooks_of(
        "megatron.core.transformer.moe.moe_utils",
        Hook(
            "get_tokens_per_expert_and_token_count",
            routing.wrap_token_counts,
            ("routing_map", "reduce_group", "topk", "with_padding_mask"),
        ),
        Hook("MoEAuxLossAutoScaler.set_loss_scale", routing.wrap_set_loss_scale, ("scale",), before=(0, 19)),
    ),
)

ORIGINAL = "__wlb_original__"
_DISTRIBUTIONS = {"yaml": "pyyaml"}
"""Names under which packages are installed, where they are imported under another."""


def rows() -> tuple[Hook, ...]:
    """The rows of HOOKS that are for the Megatron that is here."""
    here = tuple(int(part) for part in megatron_version().split(".")[:2])
    matching = (hook for hook in HOOKS if hook.before is None or here < hook.before)
    return tuple(hook for hook in matching if not hook.optional or _fits(hook))


def _fits(hook: Hook) -> bool:
    try:
        locate(hook)
    except _Misfit:
        return False
    return True


def install() -> None:
    """Replace every symbol of HOOKS; nothing is replaced unless all can be. Safe to call again."""
    located = [(hook, *locate(hook)) for hook in rows()]
    aliases = _aliases([_function(getattr(owner, name)) for _, owner, name in located])
    for hook, owner, name in located:
        symbol = getattr(owner, name)
        original = _function(symbol)
        if hasattr(original, ORIGINAL):
            continue
        replacement = _replacement(hook, original)
        setattr(replacement, ORIGINAL, original)
        setattr(owner, name, property(replacement) if isinstance(symbol, property) else replacement)
        for module, alias in aliases.get(id(original), []):
            setattr(module, alias, replacement)


def _replacement(hook: Hook, original: Any) -> Any:
    """The wrapped symbol, and with --wlb-off the original: nothing of the plugin runs then."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        runs = hook.always or not is_off()
        return hook.wrap(original, *args, **kwargs) if runs else original(*args, **kwargs)

    return replacement


def describe() -> str:
    """The table of replaced symbols, for `python -m wlb_megatron.launch --describe`."""
    replaced = rows()
    lines = [f"megatron-core {megatron_version()}: {len(replaced)} symbols are replaced"]
    symbols = [getattr(*locate(hook)) for hook in replaced]
    aliases = _aliases(symbols)
    for hook, symbol in zip(replaced, symbols, strict=True):
        names = [f"{module.__name__}:{alias}" for module, alias in aliases[id(symbol)]]
        what, *_ = (inspect.getdoc(hook.wrap) or "").split("\n\n")
        lines += [" = ".join(dict.fromkeys([hook.place, *names])), f"    {' '.join(what.split())}"]
    return "\n".join(lines)


class _Misfit(Refused):
    """A symbol that is missing, or takes other parameters."""


def _misfit(what: str) -> _Misfit:
    return _Misfit(
        f"the plugin does not fit this Megatron ({megatron_version()}): {what}. Install a version that was tried "
        f"({tried_versions()})"
    )


def locate(hook: Hook) -> tuple[Any, str]:
    """The object that holds the hook's symbol, and its name there. Refused if this Megatron has another."""
    owner, name = _locate(hook.place)
    parameters = inspect.signature(_function(getattr(owner, name))).parameters
    missing = [parameter for parameter in hook.takes if parameter not in parameters]
    if missing:
        raise _misfit(
            f"{hook.place} takes ({', '.join(parameters)}), not "
            f"{', '.join(missing)}, which wlb_megatron relies on"
        )
    return owner, name


def _function(symbol: Any) -> Any:
    """What a symbol calls: itself, or a property's getter."""
    return symbol.fget if isinstance(symbol, property) else symbol


def _aliases(originals: list[Any]) -> dict[int, list[tuple[Any, str]]]:
    """By id of each object, the names by which loaded modules hold it, Megatron's and any other's."""
    aliases: dict[int, list[tuple[Any, str]]] = {id(original): [] for original in originals}
    for _, module in sorted(sys.modules.items()):
        # Some are no modules, and to ask one that loads itself late for an attribute would load it.
        if isinstance(module, ModuleType):
            for alias, value in list(object.__getattribute__(module, "__dict__").items()):
                if id(value) in aliases:
                    aliases[id(value)].append((module, alias))
    return aliases


def _locate(place: str) -> tuple[Any, str]:
    module_name, path = place.split(":")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        getattr(owner, name)
    except (ImportError, AttributeError) as missing:
        package = getattr(missing, "name", None) if isinstance(missing, ModuleNotFoundError) else None
        if package is not None and not package.startswith("megatron"):
            raise Refused(
                f"megatron-core {megatron_version()} needs the package {package}, which is not installed: "
                f"pip install {_DISTRIBUTIONS.get(package, package)}"
            ) from missing
        raise _misfit(f"there is no {place}, which wlb_megatron replaces ({missing})") from missing
    return owner, name
