"""A model and its layout as Megatron's arguments have them, and what its layers weigh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

RECOMPUTE = ("none", "selective", "full")

WHOLE = "T"
"""A layer of attention and a feed-forward part, as a GPTModel's are, beside the symbols of a HybridModel's pattern."""

WHOLE_NET = "N"
"""The same with a gated delta net (G) in place of attention."""

ATTENDS = f"*{WHOLE}"
"""The layers that have keys."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of every layer.

    Args:
        count: How many a layer has.
        ffn: Width of one, which replaces Model.ffn for memory.
        parallel: expert_model_parallel_size.
        tensor: expert_tensor_parallel_size.
        chosen: Experts that a token passes (moe_router_topk).
        imbalance: Assumed tokens of the fullest rank's experts over the mean, in percent.
        shared: Width of the shared experts, which every token passes.
        dense_layers: How many of the model's layers have no experts. They count in the sum of parameters alone.
        one_kernel: Whether one kernel multiplies all experts of a rank (see one_kernel below), or one each.
        fused_permutation: Megatron's moe_permute_fusion.
    """

    count: int
    ffn: int
    parallel: int = 1
    tensor: int = 1
    chosen: int = 2
    imbalance: int = 150
    shared: int = 0
    dense_layers: int = 0
    one_kernel: bool = False
    fused_permutation: bool = False

    def faster_settings(self, hopper: bool) -> str:
        """What is not set and was measured to train faster (docs/measured.md); hopper: on such GPUs. "" if nothing."""
        kernel = f"{ONE_KERNEL}=1 with --moe-grouped-gemm and bf16"
        missing = {"--moe-permute-fusion": not self.fused_permutation, kernel: hopper and not self.one_kernel}
        return " and ".join(setting for setting, lacks in missing.items() if lacks)


ONE_KERNEL = "NVTE_USE_CUTLASS_GROUPED_GEMM"
"""The environment variable by which Transformer Engine multiplies all experts of a rank in one kernel if it is 1: on
Hopper GPUs, in the forward and for the gradients of the input."""


def one_kernel(grouped: bool, environment: Mapping[str, str]) -> bool:
    """Whether it does so. grouped: Megatron's moe_grouped_gemm."""
    return grouped and environment.get(ONE_KERNEL) == "1"


@dataclass(frozen=True, slots=True)
class DeltaNets:
    """Gated delta nets of a model.

    Args:
        layers: How many the model has.
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, of states and of the output.
        key_dim: Channels of a query or key head.
        value_dim: Channels of a value head.
        width: Tokens that the convolution sees.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 4

    @property
    def keys(self) -> int:
        """Channels of all query heads, and of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def state(self) -> int:
        """Elements of all heads' states."""
        return self.values * self.key_dim

    def parameters(self, hidden: int) -> int:
        """Weights of a layer."""
        projections = hidden * (2 * self.keys + 3 * self.values + 2 * self.value_heads)
        return projections + self.width * (2 * self.keys + self.values)

    def work(self, hidden: int) -> int:
        """Multiplications of a token in a layer's forward; Megatron, too, counts a state four times."""
        return self.parameters(hidden) + 4 * self.state

    def elements(self) -> int:
        """What a layer keeps of a token for its backward: the convolution's input and output, normalized and repeated
        queries and keys, values, gates, the rule's output and chunks of 64 tokens, and the norm's two outputs."""
        mixed = 2 * self.keys + self.values
        repeated = 2 * self.value_heads * self.key_dim
        return 2 * mixed + 2 * self.keys + repeated + 5 * self.values + CHUNK * self.value_heads

    def elements_at_work(self) -> int:
        """What the layer at work holds besides: exchanged rows in two orders; states and their gradients of each chunk
        of 64 tokens."""
        rows = 2 * self.keys + 2 * self.values + 2 * self.value_heads
        return 2 * rows + 2 * self.state // CHUNK


CHUNK = 64
"""Tokens over which the rule of a gated delta net is computed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A GPT, or one pipeline stage of it, in Megatron's arguments:

    hidden: hidden_size. ffn: ffn_hidden_size; where times are predicted, the width of the experts that a token passes.
    layers: num_layers; for memory those of the fullest pipeline stage, all its virtual stages together (rounded up); of
    a HybridModel their symbols, such as "*-|*E" of two virtual stages, of which each is attention, an MLP or experts
    alone. heads: num_attention_heads. kv_heads: num_query_groups under group_query_attention, else heads. head_dim:
    kv_channels, 0 for hidden / heads. qk_norm: qk_layernorm. vocab: padded_vocab_size. gated: swiglu. tied: not
    untie_embeddings_and_output_weights. dropout: hidden_dropout > 0. dtype_bytes: 2 with bf16 or fp16, else 4.
    losses: 1 + mtp_num_layers of each token; each has logits. experts: those of every layer; how many tokens they get
    is assumed.
    projections: weights of a layer's attention where heads do not say them (multi-latent attention). compressed:
    channels to which that compresses a token, q_lora_rank + kv_lora_rank + qk_pos_emb_head_dim. Its head_dim is for
    memory the mean of a key's and a value's channels.
    delta_nets: those of layers G and N.
    """

    hidden: int
    ffn: int
    layers: int | str
    heads: int
    kv_heads: int
    head_dim: int = 0
    qk_norm: bool = False
    vocab: int = 128_256
    gated: bool = True
    tied: bool = False
    dropout: bool = False
    dtype_bytes: int = 2
    losses: int = 1
    experts: Experts | None = None
    projections: int | None = None
    compressed: int | None = None
    delta_nets: DeltaNets | None = None

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        _check_positive(self)

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer that a token passes, with its share of gated delta nets."""
        return self.parameters_with(self.ffn)

    def parameters_with(self, ffn: int) -> int:
        """The same with a feed-forward part of another width."""
        parameters = attention_parameters(self) + ffn_parameters(self, ffn)
        if nets := self.delta_nets:
            parameters += nets.work(self.hidden) * nets.layers // layer_count(self.layers)
        return parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is spread, in Megatron's arguments:

    tensor, context, pipeline: ..._model_parallel_size (context_parallel_size). data: data_parallel_size. sequence:
    sequence_parallel. virtual: virtual_pipeline_model_parallel_size or 1. group: micro-batches that pass one virtual
    stage before the next (microbatch_group_size_per_vp_stage); None: one for each stage. micro_batches:
    global_batch_size / data.
    distributed_optimizer: use_distributed_optimizer (its states are spread over data x context ranks).
    fully_sharded: FSDP spreads weights and gradients over them too. losses_in_forward: with documents in chunks, losses
    do not wait for their backward; so with FSDP of either kind, whatever it spreads (plugin/step/losses.py).
    recompute: recompute_granularity or "none"; "selective" counts core attention only. recompute_layers:
    recompute_num_layers or 1. recompute_block: recompute_method is "block". keep_keys: exchanged keys are saved for
    backward (attention's option), or exchanged again. fused: gradient_accumulation_fusion. reduce_overlaps,
    gather_overlaps: overlap_grad_reduce, overlap_param_gather.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    virtual: int = 1
    group: int | None = None
    micro_batches: int = 1
    sequence: bool = False
    distributed_optimizer: bool = False
    fully_sharded: bool = False
    losses_in_forward: bool = False
    recompute: str = "none"
    recompute_layers: int = 1
    recompute_block: bool = False
    keep_keys: bool = True
    fused: bool = True
    reduce_overlaps: bool = True
    gather_overlaps: bool = True

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"unknown recompute {self.recompute!r}; choose {', '.join(RECOMPUTE)}")
        _check_positive(self)

    @property
    def gpus(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def micro_step_multiple(self) -> int:
        """The interleaved schedule takes micro-batches by groups of this many; 1F1B any number."""
        return 1 if self.virtual == 1 else self.group or self.pipeline


def attention_parameters(shape: Model) -> int:
    """Weights of a layer's attention."""
    return shape.projections or 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)


def ffn_parameters(shape: Model, ffn: int) -> int:
    """Weights of an MLP of this width."""
    return (3 if shape.gated else 2) * shape.hidden * ffn


def symbols(layers: int | str) -> str:
    """These layers by their symbols: 3 of a GPTModel are "TTT"."""
    return layers if isinstance(layers, str) else WHOLE * layers


def layer_count(layers: int | str) -> int:
    """How many layers these are: 4 of "*-|*E"."""
    return len(symbols(layers).replace("|", ""))


def keyed_layers(layers: int | str) -> int:
    """Those of these layers that have keys."""
    return sum(symbols(layers).count(symbol) for symbol in ATTENDS)


def _check_positive(sizes: Model | Layout) -> None:
    for field in fields(sizes):
        value = getattr(sizes, field.name)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"{field.name} must be at least 1, got {value}")
