"""One rank of a Megatron run for the tests: known weights in, losses, gradients and logits out.

Started by torch.distributed.run with the plugin's flags; WORKER_OUT names the folder for what this rank saw. The
weights are a function of a parameter's global name alone, so that every layout starts from the same model.
"""

import copy
import itertools
import json
import os
import re
import sys
import weakref
import zlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args, training
from megatron_runs import split_fused

from wlb_megatron.attention import core_attention
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.plugin import launch, pretrain_gpt
from wlb_megatron.plugin.flags import training_job
from wlb_megatron.plugin.flags.trained_model import layer_symbols
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.model import spec
from wlb_megatron.plugin.step import forward_step as steps
from wlb_megatron.plugin.step import recomputation
from wlb_megatron.plugin.step.losses import DeferredLoss

OUT = Path(os.environ["WORKER_OUT"])
EXACT = "WORKER_EXACT" in os.environ
"""Attention in plain torch, for a run in fp32 on a GPU: cuDNN's kernels take 16 bits alone."""
LISTS = "losses documents logits tokens evaluated rows kept waits recomputed layers_run own reloads"
seen: dict[str, Any] = {name: [] for name in LISTS.split()}
OWN_LIMIT = 5.0
"""Losses from which own_loss leaves tokens out."""


def global_names(chunk: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters by the name they have in a GPTModel that is not cut into pipeline stages.

    Of a HybridModel's pattern *-*E, layers 2 and 3 of 0 to 3 are layer 1 of a GPTModel.
    """
    pattern = (getattr(get_args(), "hybrid_layer_pattern", None) or "").replace("|", "").split("/")[0]
    numbers = {
        name: len(re.findall("[*G]", pattern[: module.layer_number])) - 1
        if pattern
        else module.layer_number - 1
        for name, module in chunk.named_modules()
        if isinstance(module, TransformerLayer) and not (pattern and "mtp" in name)
    }
    named = {}
    for name, parameter in chunk.named_parameters():
        for prefix, number in numbers.items():
            if name.startswith(prefix + "."):
                name = re.sub(r"layers\.\d+", f"layers.{number}", prefix) + name[len(prefix) :]
                break
        name = re.sub(r"mtp_model_layer\.layers\.\d+", "mtp_model_layer", name)
        name = name.replace("final_norm.", "final_layernorm.")
        named[_global_expert(re.sub(r"^(module\.)+", "", name))] = parameter
    return named


def _global_expert(name: str) -> str:
    """An expert's number among all of the layer's: local_experts.N., or weightN of grouped matrix products."""
    if ".experts." not in name:
        return name
    ranks = parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * get_args().num_experts // ranks
    number = re.compile(r"(local_experts\.|weight|bias)(\d+)")
    return number.sub(lambda match: f"{match[1]}{first + int(match[2])}", name)


def fused_matrices() -> dict[str, tuple[int, ...]]:
    """See split_fused: MLPs' gate and up; a gated delta net's queries, keys, values, gates, beta and alpha."""
    args = get_args()
    fused = {"linear_fc1": (1, 1)} if args.swiglu else {}
    if "G" not in layer_symbols(args):
        return fused
    heads, values = args.linear_num_value_heads, args.linear_num_value_heads * args.linear_value_head_dim
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    return fused | {"in_proj": (keys, keys, values, values, heads, heads), "conv1d": (keys, keys, values)}


def tensor_parallel_dim(parameter: torch.nn.Parameter) -> int | None:
    """Dimension along which tensor-parallel ranks hold parts of it."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def with_known_weights(chunks: list[Any]) -> list[Any]:
    dense, expert = (
        tuple(getattr(parallel_state, f"get_{kind}_parallel_{what}")() for what in ("world_size", "rank"))
        for kind in ("tensor_model", "expert_tensor")
    )
    tied = not get_args().untie_embeddings_and_output_weights
    for chunk in chunks:
        for name, parameter in global_names(chunk).items():
            if tied and name == "output_layer.weight":  # the last pipeline stage's copy
                name = "embedding.word_embeddings.weight"
            dim = tensor_parallel_dim(parameter)
            size, rank = expert if ".experts." in name else dense
            shape = list(parameter.shape)
            if dim is not None:
                shape[dim] *= size
            full = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            full *= 0.2 if shape[-1] <= 64 else 1.6 / shape[-1] ** 0.5
            if "norm" in name:
                full = 1 + 0.1 * full
            if EXACT:  # the weights that a run in bf16 has
                full = full.bfloat16().float()
            if dim is not None:
                matrices = split_fused(full, dim, name, fused_matrices())
                full = torch.cat([matrix.chunk(size, dim)[rank] for matrix in matrices], dim)
            parameter.data.copy_(full)
    return chunks


def journal(path: Path) -> None:
    """Append the iteration's documents and losses, to the last bit, as one line that a kill cannot split unseen."""
    iteration = seen["documents"][-1][0]
    drawn = {index: pieces for number, index, pieces, _ in seen["documents"] if number == iteration}
    micro_batches = list(drawn.values())  # each once for all model chunks
    losses = [[loss.hex(), count] for loss, count in seen["losses"][-len(micro_batches) :]]
    line = json.dumps({"iteration": iteration, "documents": micro_batches, "losses": losses})
    with open(f"{path}.{torch.distributed.get_rank()}", "a", encoding="utf-8") as lines:
        lines.write(line + "\n")


def gather_gradients(chunks: list[Any]) -> None:
    """With the distributed optimizer each rank holds its share of the reduced gradients: bring the others' here."""
    if not get_args().use_distributed_optimizer or get_args().use_megatron_fsdp:
        return
    for chunk in chunks:
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                share = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, share, group=ranks)


def reduced_gradients(chunk: Any) -> dict[str, tuple[torch.Tensor, int | None]]:
    """By global name: the gradient in Megatron's buffer, with FSDP joined from all ranks' parts, and how it is cut."""
    if get_args().use_megatron_fsdp:
        return fsdp_gradients(chunk.param_and_grad_buffer)
    return {
        name: (
            parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad.full_tensor(),
            tensor_parallel_dim(parameter),
        )
        for name, parameter in global_names(chunk).items()
    }


def fsdp_gradients(buffer: Any) -> dict[str, tuple[torch.Tensor, int | None]]:
    """The same of Megatron-FSDP's buffer, where each rank holds a run of a parameter's elements."""
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    gradients = {}
    for name, sharded in buffer.optimizer_named_parameters:
        parameter = sharded.orig_param
        held = buffer.parameter_groups[buffer.param_to_param_group[parameter]].main_grad_buffer
        parts: list[Any] = [None] * ranks.size()
        part = held.get_item(held.param_idx[parameter], only_shard=True).cpu()
        torch.distributed.all_gather_object(parts, part, group=ranks)
        whole = torch.cat(parts).view(parameter.shape)
        gradients[re.sub(r"^(module\.)+", "", name)] = whole, tensor_parallel_dim(parameter)
    return gradients


def watch() -> None:
    """Record what this rank computes: losses and their documents, gradients after reduction, logits if asked."""
    prepare, loss, make_step = spec.prepare_model, steps.loss_per_token, steps.forward_step

    def prepare_with_known_weights(chunks: list[Any], settings: Any) -> list[Any]:
        chunks = with_known_weights(prepare(chunks, settings))
        seen["waits"] = [chunk.config.batch_p2p_sync for chunk in chunks]
        if "WORKER_DOUBLES" in os.environ:
            chunks = [DOUBLES[os.environ["WORKER_DOUBLES"]](chunk) for chunk in chunks]
        if os.environ.get("WORKER_LOGITS"):
            for chunk in chunks:
                if hasattr(chunk, "output_layer"):
                    chunk.output_layer.register_forward_hook(
                        lambda module, inputs, output: seen["logits"].append(output[0].detach().clone())
                    )
        return chunks

    def loss_per_token(mask: Any, output: Any) -> Any:
        training = torch.is_grad_enabled()
        if training and os.environ.get("WORKER_NAN") == str(get_args().curr_iteration + 1):
            output = output * float("nan")
        result = loss(mask, output)
        if not training:
            seen["evaluated"].append((seen["evaluated"].pop(), float(result[0]), int(result[1])))
            return result
        seen["losses"].append((float(result[0].detach()), int(result[1])))
        return result

    def forward_step(data_iterator: Any, model: Any, *rest: Any) -> Any:
        def recording() -> Any:
            for batch in data_iterator:
                planned, layout = batch.planned, batch.layout
                rows = planned.shard.ranks[layout.cp_rank].tolist()
                pieces = [tuple(piece[:4]) for piece in planned.pieces]
                seen["documents"].append((planned.iteration, planned.index, pieces, rows))
                seen["tokens"].append(None if batch.held is None else batch.held.tokens.clone())
                if os.environ.get("WORKER_MISCOUNT") == str(planned.iteration) and planned.index == 0:
                    get_args().consumed_train_samples += 4
                yield batch

        def evaluating() -> Any:
            for batch in data_iterator:
                seen["evaluated"].append([tuple(piece[:4]) for piece in batch.planned.pieces])
                seen["rows"].append(batch.planned.shard.tokens // batch.layout.cp_size)
                yield batch

        return make_step(recording() if torch.is_grad_enabled() else evaluating(), model, *rest)

    spec.prepare_model = prepare_with_known_weights
    steps.loss_per_token = loss_per_token
    steps.forward_step = forward_step
    save_when_reduced()


def save_when_reduced() -> None:
    """Write what this rank has seen after each iteration, the first iteration's gradients too."""
    finalize = training.finalize_model_grads

    def finalize_and_save(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = finalize(model, *args, **kwargs)
        rehearsed = seen["documents"] and seen["documents"][-1][0] < 0
        if "gradients" not in seen and not rehearsed:
            gather_gradients(model)
            seen["gradients"] = {
                name: (gradient.detach().cpu().clone(), dim)
                for chunk in model
                for name, (gradient, dim) in reduced_gradients(chunk).items()
            }
            seen["place"] = {
                "tp": parallel_state.get_tensor_model_parallel_rank(),
                "cp": parallel_state.get_context_parallel_rank(),
                "dp": parallel_state.get_data_parallel_rank(),
                "pp": parallel_state.get_pipeline_model_parallel_rank(),
                "fused": fused_matrices(),
                "etp": parallel_state.get_expert_tensor_parallel_rank(),
                "layers": sum(
                    isinstance(one, TransformerLayer) for chunk in model for one in chunk.modules()
                ),
            }
        seen["recomputed"].append(part(recomputation.Recomputation).numbers)
        torch.save(seen, OUT / f"rank{torch.distributed.get_rank()}.pt")
        if "WORKER_JOURNAL" in os.environ:
            journal(Path(os.environ["WORKER_JOURNAL"]))
        return result

    training.finalize_model_grads = finalize_and_save


class DoubledLosses(GPTModel):
    """A script's own model, which changes the losses before it returns them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return output * 2 if self.post_process else output


def of_a_class_of_its_own(chunk: Any) -> Any:
    chunk.__class__ = DoubledLosses
    return chunk


def with_a_hook(chunk: Any) -> Any:
    chunk.register_forward_hook(lambda module, _, output: output * 2 if module.post_process else output)
    return chunk


def with_another_forward(chunk: Any) -> Any:
    """On the class itself, as a library patches it: it cannot be seen beforehand."""
    GPTModel.forward = _doubled(GPTModel.forward)
    return chunk


def in_place(chunk: Any) -> Any:
    GPTModel.forward = _doubled(GPTModel.forward, in_place=True)
    return chunk


def _doubled(forward: Any, *, in_place: bool = False) -> Any:
    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if not self.post_process:
            return output
        return output.mul_(2) if in_place else output * 2

    return doubled


DOUBLES = {
    "class": of_a_class_of_its_own,
    "hook": with_a_hook,
    "patch": with_another_forward,
    "patch in place": in_place,
}


def own_loss(loss_mask: Any, output_tensor: Any, model: Any = None) -> Any:
    """A script's own: a share for all words, squares, and a mask and a number of tokens of its own."""
    losses = output_tensor.view(-1).float()
    mask = loss_mask.view(-1) * (losses.detach() < OWN_LIMIT)
    loss = torch.sum((0.9 * losses + 0.1 + 0.02 * losses.square()) * mask)
    count, squares = mask.sum().to(torch.int), torch.sum(losses.detach().square() * mask)
    seen["own"].append((torch.is_grad_enabled(), float(loss.detach()), int(count)))
    if torch.is_grad_enabled():
        seen["losses"].append((float(loss.detach()), int(count)))
    logged = {"lm loss": loss.detach(), "squares": squares}
    return loss, count, {name: torch.stack([value, count.float()]) for name, value in logged.items()}


def own_forward_step(data_iterator: Any, model: Any) -> Any:
    """As far as the plugin looks at it: what it makes its loss with."""
    loss_mask = next(data_iterator)["loss_mask"]
    return None, partial(own_loss, loss_mask, model=model)


def watch_deferred_losses() -> None:
    """Record how many tensors of earlier micro-batches' ends (hidden states, logits) are there when the next deferred
    loss runs, and at the end of the step."""
    run, prepare, finalize = DeferredLoss.run, spec.prepare_model, training.finalize_model_grads
    earlier: list[weakref.ref[Any]] = []

    def kept() -> None:
        seen["kept"].append(sum(tensor() is not None for tensor in earlier))

    def run_watched(self: DeferredLoss) -> torch.Tensor:
        kept()
        return run(self)

    def note(_: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
        hidden = inputs[0] if inputs else named["input_"]  # Megatron's dev branch names it
        earlier.extend(map(weakref.ref, (hidden, output[0])))

    def prepare_watched(chunks: list[Any], settings: Any) -> list[Any]:
        for chunk in prepare(chunks, settings):
            if hasattr(chunk, "output_layer"):
                chunk.output_layer.register_forward_hook(note, with_kwargs=True)
        return chunks

    def finalize_watched(*args: Any, **kwargs: Any) -> Any:
        kept()
        return finalize(*args, **kwargs)

    DeferredLoss.run, spec.prepare_model = run_watched, prepare_watched
    training.finalize_model_grads = finalize_watched


def plan_recomputation(bytes_of_ranks: str) -> None:
    """So many bytes for a step's activations, "9000" or one for each rank "9000,8000", which no CPU tells. Records how
    many layers' forwards each step has run, recomputed ones counted again."""
    budgets = [int(size) for size in bytes_of_ranks.split(",")]
    rank, forward, finalize = int(os.environ["RANK"]), TransformerLayer.forward, training.finalize_model_grads
    run = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        run[0] += 1
        return forward(*args, **kwargs)

    def finalize_counted(*args: Any, **kwargs: Any) -> Any:
        seen["layers_run"].append(run[0])
        run[0] = 0
        return finalize(*args, **kwargs)

    TransformerLayer.forward, training.finalize_model_grads = counted, finalize_counted
    recomputation._available = lambda *_: (0, budgets[rank % len(budgets)])
    recomputation._measure = lambda *_, **__: None  # of a GPU: its bytes are not these


def norms_for_sequence_parallelism() -> None:
    """Megatron's norms without Transformer Engine refuse sequence parallelism, for want of one mark: their weights'
    gradients are of a rank's tokens, to be summed over tensor-parallel ranks."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = make(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = marked


def variants_without_transformer_engine() -> None:
    """--experimental-attention-variant, whose layers Megatron makes of Transformer Engine's parts alone."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    def attention(config: Any, backend: Any = None) -> Any:
        spec = get_gpt_layer_local_spec(normalization=config.normalization).submodules.self_attention
        spec.metainfo = {"fuse_input_layernorm": False}
        return spec

    def delta_net(make: Any, **given: Any) -> Any:
        spec = make(**given)
        spec.metainfo = {"fuse_input_layernorm": False}
        return spec

    LocalSpecProvider.column_parallel_layer_norm_linear = lambda self: ColumnParallelLinear
    specs._get_backend_spec_provider = lambda config: LocalSpecProvider()
    specs._get_self_attention_module_spec = attention
    specs.get_gated_delta_net_module_spec = partial(delta_net, specs.get_gated_delta_net_module_spec)


def plan_at_random(seed: int) -> None:
    """Dynamic groups by chance: what trains must not depend on the plan."""
    from random_groups import random_plan

    from wlb_megatron.dynamic.plan import in_multiples
    from wlb_megatron.dynamic.plan_step import GREEDY, Outcome
    from wlb_megatron.plugin.plans import dynamic

    iterations = itertools.count(seed)

    class RandomPlans:
        def __init__(self, plan: partial[Outcome]) -> None:
            self.stage, self.multiple = plan.keywords["stage"], plan.keywords["multiple"]

        def plan(self, tokens: Any, *_: Any, **__: Any) -> Outcome:
            plan = random_plan(tokens, self.stage, next(iterations))
            return Outcome(in_multiples(plan, tokens, self.multiple), GREEDY, 1, 1)

    dynamic.GroupPlanner = RandomPlans


def group_micro_batches(sizes: str) -> None:
    """Groups without documents in chunks, "1,3,2": what trains must not depend on them. One for each data-parallel
    rank, "1,2;2,1". Each iteration begins with the next of them."""
    from wlb_megatron.plugin.micro_batches import planning

    groups_of_ranks = [tuple(map(int, counts.split(","))) for counts in sizes.split(";")]

    def chunk_groups(plan: Any, settings: Any) -> tuple[int, ...]:
        mine = groups_of_ranks[settings.dp_rank % len(groups_of_ranks)]
        first = plan.iteration % len(mine)
        return mine[first:] + mine[:first]

    planning.chunk_groups = chunk_groups


def offload_on_cpus() -> None:
    """--fine-grained-activation-offloading, for which Megatron asks for Transformer Engine. What is offloaded is a copy
    that the handler of its micro-batch gives back; the order in which it does is noted."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload
    from megatron.core.transformer.transformer_config import TransformerConfig

    transformer_engine.cpu_offload = SimpleNamespace()
    torch.Tensor.record_stream = lambda *_: None
    handler = offload.ChunkOffloadHandler
    activation = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
    handler._can_manage_tensor_for_offload = activation
    made, reload = TransformerConfig.__post_init__, handler.bulk_reload_group

    def configured(self: Any) -> None:
        self.fine_grained_activation_offloading, self.min_offloaded_tensor_size = True, 1
        self.offload_modules = ["core_attn", "attn_proj", "attn_norm", "mlp_norm", "qkv_linear"]
        made(self)

    def noted(self: Any) -> None:
        handlers = offload.PipelineOffloadManager.get_instance()._cached_chunks_forward
        seen["reloads"].append(handlers.index(self))
        reload(self)

    TransformerConfig.__post_init__, handler.bulk_reload_group = configured, noted


if __name__ == "__main__":
    del __file__  # else the process that collects what checkpoint writers say imports all this again
    if "WORKER_NODES" in os.environ:  # each rank is a node, with a folder of its own
        os.chdir(f"{os.environ['WORKER_NODES']}/{os.environ['RANK']}")
        os.environ["LOCAL_RANK"] = "0"
    watch()
    watch_deferred_losses()
    if EXACT:
        core_attention._kernels = lambda *_: ("torch", TorchKernels())
    norms_for_sequence_parallelism()
    if "--experimental-attention-variant" in sys.argv and find_spec("transformer_engine") is None:
        variants_without_transformer_engine()
    if "--fp8-format" in sys.argv and find_spec("transformer_engine") is None:
        from fp8_stand_in import stand_in

        stand_in()
    if "WORKER_OFFLOADS" in os.environ:
        offload_on_cpus()
    if "WORKER_ONE_LENGTH" in os.environ:  # as with --tp-comm-overlap, which needs GPUs
        training_job.one_length = lambda args: True
    if "WORKER_RANDOM_GROUPS" in os.environ:
        plan_at_random(int(os.environ["WORKER_RANDOM_GROUPS"]))
    if "WORKER_AVAILABLE" in os.environ:
        plan_recomputation(os.environ["WORKER_AVAILABLE"])
    if "WORKER_OWN_LOSS" in os.environ:
        pretrain_gpt._replaced = own_forward_step
    if "WORKER_GROUPS" in os.environ:
        group_micro_batches(os.environ["WORKER_GROUPS"])
    entry = "pretrain_hybrid" if "--hybrid-layer-pattern" in sys.argv else "pretrain_gpt"
    if "WORKER_SCRIPTS" in os.environ:  # a folder of Megatron's scripts: 0.18 builds models nowhere else
        sys.argv.insert(1, f"{os.environ['WORKER_SCRIPTS']}/{entry}.py")
        launch.main()
    else:
        pretrain_gpt.main(entry)
    torch.save(seen, OUT / f"rank{os.environ['RANK']}.pt")
