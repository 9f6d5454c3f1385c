"""What must compute a small case right before a job trains with it: a Megatron or Transformer Engine that was not
tried. `wlb-megatron doctor` runs the case, too.

Names and parameters of what is replaced of Megatron are compared at start. Meanings are not seen there: by how many
tokens gradients are divided, or how strong routers' losses are. So a small step runs through Megatron's own schedule,
with the plugin's hooks, and is compared with plain torch. Two context-parallel ranks, processes on CPU tensors over
gloo (wlb_megatron/cpu is on their PYTHONPATH), train one step of a GPT with experts. What it must give is computed in
fp64, one document at a time; only the names and layouts of the weights are Megatron's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from wlb_megatron.child import run_ranks
from wlb_megatron.errors import CPU, WlbError
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.flags.versions import (
    TRIED_TRANSFORMER_ENGINE,
    check_transformer_engine,
    tried_versions,
    untried_megatron,
)
from wlb_megatron.refusals import Refused
from wlb_megatron.registry import USUAL_KERNELS

RANKS = 2
"""Context-parallel ranks of the check."""

TOLERATED = 1e-2
"""Largest relative error: fp32 against fp64 comes to 1e-5; a factor of 1 / RANKS is 0.5."""

SECONDS = 180
"""A check that takes longer has failed. It takes about ten, most of them imports."""

_OF_THE_JOB = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")
"""Beginnings of environment variables that would make the check's processes ranks of the job."""


class Comparison(NamedTuple):
    """`what` was compared, its error relative to the right value, and its strength: 1 where it is right."""

    what: str
    error: float
    strength: float


def try_megatron() -> None:
    """On all ranks at once: check a Megatron that was not tried, on rank 0, which tells the others.

    A warning on rank 0 if it passes; Refused on all ranks, with what differs, if it does not.
    """
    refusal: list[str | None] = [None]
    if dist.get_rank() == 0 and (version := untried_megatron()) is not None:
        refusal = [_refusal(version)]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0]:
        raise Refused(refusal[0])


def _refusal(version: str) -> str | None:
    """Why it is not to be trained with; None, with a warning, where it may be."""
    try:
        largest_error = check()
    except (WlbError, OSError, ValueError) as wrong:
        return (
            f"wlb_megatron was not tried with megatron-core {version}, and its check of it fails: {wrong}. Install a "
            f"version that was tried ({tried_versions()})"
        )
    print(
        f"WARNING: wlb_megatron was not tried with megatron-core {version}; a small step of it comes out right: loss, "
        f"gradients and routers' losses within {largest_error:.0e}",
        flush=True,
    )
    return None


def check() -> float:
    """Run the check's ranks on this machine's CPU; the largest error. WlbError with what differs, or why it failed."""
    work = "from wlb_megatron.plugin import hooks, megatron_trial as trial; trial.serve(hooks.install)"
    try:
        outputs = run_ranks([sys.executable, "-P", "-c", work], RANKS, _environment(), SECONDS)
    except TimeoutError:
        raise WlbError(f"it did not finish within {SECONDS} s") from None
    return judged([Comparison(*figures) for out in outputs for figures in json.loads(out.splitlines()[-1])])


def judged(comparisons: list[Comparison]) -> float:
    """The largest error. WlbError with each finding that is out of bounds."""
    failures = {
        comparison.what: comparison for comparison in comparisons if not comparison.error <= TOLERATED
    }
    if failures:
        raise WlbError(
            "; ".join(
                f"{comparison.what}: {comparison.strength:.3g} times the right strength, "
                f"off by {comparison.error:.1e} of it"
                for comparison in failures.values()
            )
        )
    return max(comparison.error for comparison in comparisons)


def _environment() -> dict[str, str]:
    """Of a process that is no rank of the job, sees no GPU, and imports what this one does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_JOB)}
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([str(CPU), *filter(None, sys.path)]),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
    }


def try_transformer_engine(job: TrainingJob) -> None:
    """Tell of a Transformer Engine newer than those tried, and refuse it unless small calls of each kind come out
    right on this rank's GPU: the plugin calls entry points below its modules, which may change without a word."""
    version = check_transformer_engine(job.model.implementation)
    if version is None or not job.device.on_gpu or job.given.kernels not in ("auto", USUAL_KERNELS):
        return
    untried = f"wlb_megatron was not tried with Transformer Engine {version}"
    cure = f"install a tried one (pip install 'transformer-engine[pytorch]{TRIED_TRANSFORMER_ENGINE}')"
    try:
        from wlb_megatron.attention.kernels.before_training import TOLERATED, worst_error
        from wlb_megatron.attention.kernels.te_backend import TransformerEngineKernels

        with torch.cuda.device(job.device.index):
            largest_error = worst_error(TransformerEngineKernels(), torch.bfloat16, "cuda")
    except Exception as error:
        raise Refused(f"{untried}, and its attention cannot be called ({error!r}): {cure}") from error
    if not largest_error <= TOLERATED:
        raise Refused(
            f"{untried}, and its attention is off by {largest_error:.1e} of the largest value, {TOLERATED:.0e} is "
            f"tolerated: {cure}"
        )
    if job.device.rank == 0:
        error_bound = f"within {largest_error:.0e} of the largest value"
        print(f"WARNING: {untried}; small calls of its attention come out right ({error_bound})", flush=True)


LENGTHS = ((9, 1, 14, 8), (5, 30, 3, 7, 11))
"""Documents (tokens) of two micro-batches, which are multiples of 2 x RANKS: none is padded."""
PREDICTIONS = sum(length - 1 for lengths in LENGTHS for length in lengths)

VOCABULARY, HIDDEN, HEADS, FFN, ROTARY_BASE = 64, 32, 4, 48, 10000.0
EXPERTS, TOPK = 4, 2
"""The model has one layer, in which every token goes to TOPK of the experts."""


def loss_of(
    weights: Mapping[str, Tensor], micro_batches: Sequence[Sequence[Tensor]], aux: float, z: float
) -> Tensor:
    """The step's loss, a mean over its predictions.

    micro_batches: each one's documents, int64[n] token ids. aux, z: coefficients of the routers' losses, each a mean
    over a micro-batch, which weighs by its tokens.
    """
    total = torch.zeros((), dtype=torch.float64)
    for documents in micro_batches:
        scores, routed = zip(*(_forward(weights, ids) for ids in documents), strict=True)
        for each, ids in zip(scores, documents, strict=True):
            total = total + functional.cross_entropy(each[:-1], ids[1:], reduction="sum")
        logits = torch.cat(routed)
        routes = torch.zeros_like(logits).scatter(1, logits.topk(TOPK).indices, 1.0)
        shares = routes.mean(0) / TOPK * logits.softmax(-1).mean(0)
        routers = aux * EXPERTS * shares.sum() + z * logits.logsumexp(-1).square().mean()
        total = total + len(logits) * routers
    return total / PREDICTIONS


def _forward(weights: Mapping[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
    """[n, vocabulary] of one document, and its router's logits."""
    layer = {name.removeprefix("decoder.layers.0."): weight for name, weight in weights.items()}
    hidden = layer["embedding.word_embeddings.weight"][ids]
    normed = _norm(hidden, layer["input_layernorm.weight"])
    # Query, key and value of a head lie beside each other.
    qkv = (normed @ layer["self_attention.linear_qkv.weight"].T).view(len(ids), HEADS, 3, -1)
    query, key, value = qkv.permute(2, 1, 0, 3)
    out = functional.scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
    hidden = hidden + out.transpose(0, 1).flatten(1) @ layer["self_attention.linear_proj.weight"].T
    normed = _norm(hidden, layer["pre_mlp_layernorm.weight"])
    logits = normed @ layer["mlp.router.weight"].T
    top = logits.topk(TOPK)
    shares = torch.zeros_like(logits).scatter(1, top.indices, top.values.softmax(-1))
    for number in range(EXPERTS):
        expert = f"mlp.experts.local_experts.{number}"
        gate, up = (normed @ layer[f"{expert}.linear_fc1.weight"].T).chunk(2, -1)
        answer = (functional.silu(gate) * up) @ layer[f"{expert}.linear_fc2.weight"].T
        hidden = hidden + shares[:, number, None] * answer
    normed = _norm(hidden, layer["decoder.final_layernorm.weight"])
    return normed @ layer["output_layer.weight"].T, logits


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-5)


def _rotated(x: Tensor) -> Tensor:
    """[heads, n, channels] at positions 0 .. n - 1, halves of the channels rotated together."""
    half = x.shape[-1] // 2
    speeds = ROTARY_BASE ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * speeds
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def rank_comparisons(meeting: str, rank: int, install: Callable[[], None]) -> list[Comparison]:
    """What this rank finds. meeting: a file in an empty folder, over which the ranks meet. install: see `serve`."""
    sys.modules.setdefault("apex", None)  # type: ignore[arg-type]  # Megatron takes its kernels, which need a GPU
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", world_size=RANKS, rank=rank)
    from megatron.core import parallel_state
    from megatron.training import global_vars

    install()
    global_vars._GLOBAL_ARGS = argparse.Namespace()
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
    try:
        return _compared(rank)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _compared(rank: int) -> list[Comparison]:
    """A step without routers' losses, one with the balancing loss alone, one with the z-loss alone, and one without
    them whose losses are made right before their backwards."""
    loss, computed, right_loss, exact = _step(rank)
    comparisons = [
        Comparison("loss", abs(loss / right_loss - 1), loss / right_loss),
        _comparison("gradients", exact, computed),
    ]
    for name, aux, z in (("auxiliary loss", 0.3, 0.0), ("z-loss", 0.0, 0.3)):
        _, with_it, _, exact_with_it = _step(rank, aux, z)
        what = f"routers' {name} (its gradients)"
        comparisons.append(_comparison(what, exact_with_it - exact, with_it - computed))
    _, deferred, _, exact = _step(rank, deferred=True)
    return [*comparisons, _comparison("gradients of deferred losses", exact, deferred)]


def _comparison(what: str, exact: Tensor, computed: Tensor) -> Comparison:
    size = float(exact.norm())
    strength = float(exact @ computed) / size**2
    return Comparison(what, float((computed - exact).norm()) / size, strength)


def _step(
    rank: int, aux: float = 0.0, z: float = 0.0, *, deferred: bool = False
) -> tuple[float, Tensor, float, Tensor]:
    """Loss and gradients (of all parameters, end to end) through Megatron, and the right ones. deferred: see losses.py.

    The losses are as Megatron's log has them, without the routers'.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from wlb_megatron.plugin.step.losses import deferring

    generator = torch.Generator().manual_seed(0)
    documents = [
        [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
        for lengths in LENGTHS
    ]
    model = _model(aux, z)
    parameters = dict(sorted(model.module.named_parameters()))
    for name, parameter in parameters.items():
        draw = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + 0.1 * draw if "norm" in name else 0.2 * draw)
    weights = {name: parameter.detach().double().requires_grad_() for name, parameter in parameters.items()}
    exact = torch.autograd.grad(loss_of(weights, documents, aux, z), list(weights.values()))
    model.zero_grad_buffer()
    with deferring(deferred, model.config, len(documents)):
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=_batches(rank, documents),
            model=[model],
            num_microbatches=len(documents),
            seq_length=max(map(sum, LENGTHS)),
            micro_batch_size=1,
            forward_only=False,
        )
    sums = sum(microbatch["lm loss"].double() for microbatch in losses)
    dist.all_reduce(sums)
    right_loss = float(loss_of(weights, documents, 0.0, 0.0))
    gradients = torch.cat([parameter.main_grad.double().flatten() for parameter in parameters.values()])
    return float(sums[0]) / PREDICTIONS, gradients, right_loss, torch.cat([each.flatten() for each in exact])


def _model(aux: float, z: float) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from wlb_megatron.plugin.model.spec import plan_positions, with_wlb_attention

    fusions = "bias_activation", "bias_dropout", "apply_rope", "masked_softmax", "gradient_accumulation"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=aux,
        moe_z_loss_coeff=z or None,
        moe_token_dispatcher_type="allgather",  # the router is the same, and it asks for no stream
        context_parallel_size=RANKS,
        calculate_per_token_loss=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        **dict.fromkeys((f"{name}_fusion" for name in fusions), False),  # their kernels need a GPU
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    gpt = GPTModel(
        config,
        with_wlb_attention(spec),
        vocab_size=VOCABULARY,
        max_sequence_length=max(map(sum, LENGTHS)),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=int(ROTARY_BASE),
    )
    plan_positions(gpt)
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def _batches(rank: int, documents: list[list[Any]]) -> Iterator[dict[str, Any]]:
    from wlb_megatron.attention.core_attention import packed_seq_params
    from wlb_megatron.sharding.attention_calls import attention_layout
    from wlb_megatron.sharding.cut import shard

    for pieces, lengths, sharding in zip(documents, LENGTHS, ("hybrid", "per-document"), strict=True):
        plan = shard(lengths, RANKS, sharding)
        index = torch.from_numpy(plan.packed_index(rank))
        labels = torch.cat([ids.roll(-1) for ids in pieces])
        mask = torch.cat([torch.arange(length) < length - 1 for length in lengths]).float()
        yield {
            "input_ids": torch.cat(pieces)[index][None],
            "position_ids": torch.from_numpy(plan.positions(rank))[None],
            "attention_mask": None,
            "labels": labels[index][None],
            "loss_mask": mask[index][None],
            "packed_seq_params": packed_seq_params(attention_layout(plan, rank), "cpu"),
        }


def _forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    from wlb_megatron.plugin.step.forward_step import sum_of_losses
    from wlb_megatron.plugin.step.losses import claim

    batch = next(data_iterator)
    output = model(**batch)
    function, deferred = partial(sum_of_losses, batch["loss_mask"]), claim(output)
    return output, function if deferred is None else partial(deferred.begin, function)


def serve(install: Callable[[], None]) -> None:
    """Print what the rank finds that this process is. install: replaces Megatron's symbols."""
    rank, meeting = sys.argv[1:]
    print(json.dumps(rank_comparisons(meeting, int(rank), install)))
