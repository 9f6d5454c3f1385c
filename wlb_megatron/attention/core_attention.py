"""Replaces the `core_attention` of Megatron's self-attention and its rotary embedding, and passes them the parameters
that carry a plan.

The core attention subclasses the one that the layer spec names, so checkpoints keep their keys; only its forward
differs. Megatron is imported here and nowhere else in this package.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels import kernel_choice
from wlb_megatron.attention.kernels.before_training import Warmable, warm_up
from wlb_megatron.attention.kernels.kernel_choice import Layer
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.kv_exchange import KeyCache
from wlb_megatron.attention.sharded_attention import Kernels, LayerSettings, sharded_attention
from wlb_megatron.errors import WlbError
from wlb_megatron.sharding.attention_calls import AttentionLayout


@dataclass
class WlbPackedSeqParams(PackedSeqParams):
    """Megatron's parameters of a packed sequence, with this rank's layout.

    qkv_format is not 'thd'. So Megatron keeps q, k, v as [t, 1, heads, dim] and rotates each row by the frequencies
    that it is given; PlannedRotaryEmbedding computes these at the plan's positions.
    """

    layout: AttentionLayout | None = None
    group: Any = None  # the ranks that share the micro-batch; None: Megatron's context-parallel group
    # For multi-token prediction (plugin/step/multi_token.py): tokens, labels, loss mask and positions, a row for each
    # depth; how many of the rank's tokens predict a next one; whether Megatron has copied the labels; the depth at
    # which a layer runs.
    further: tuple[Tensor, ...] | None = None
    predicted: float = 0.0
    copied: bool = False
    depth: int = 0
    documents: Any = None  # for gated delta nets, see plugin/micro_batches/loaded.DocumentRows


def packed_seq_params(
    layout: AttentionLayout, device: torch.device | str | None = None, group: Any = None
) -> WlbPackedSeqParams:
    """The parameters of one micro-batch for the rank whose layout it is, to pass to the model.

    * device: default the current CUDA device, if there is one. Copies to it are asynchronous, and all layers share
      them.
    * group: the process group of the ranks that share the micro-batch (default: Megatron's context-parallel group).
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return WlbPackedSeqParams(
        qkv_format="sbhd",
        max_seqlen_q=layout.longest,
        max_seqlen_kv=layout.longest,
        layout=device_layout(layout, device),
        group=group,
    )


class WlbCoreAttention:
    """Mixin before Megatron's core attention class. See `wlb_core_attention`."""

    keep_keys = True
    """True: save exchanged keys for backward. False: exchange them again in backward, to save memory."""
    asked_kernels = "auto"
    """auto, or a name in registry.KERNELS."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        _refuse(config, attn_mask_type, attention_type, attention_dropout, kwargs)
        # The plugin does context parallelism: the parent must neither refuse it nor set up its own.
        single_rank_config = copy.copy(config)
        single_rank_config.context_parallel_size = 1
        if "k_channels" not in inspect.signature(super().__init__).parameters:
            # Megatron's local class has no setting for MLA's head dims; they are taken from the tensors.
            kwargs = {
                name: value for name, value in kwargs.items() if name not in ("k_channels", "v_channels")
            }
        super().__init__(  # type: ignore[call-arg]
            config=single_rank_config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            attention_dropout=attention_dropout,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
            **kwargs,
        )
        self.config = config
        self._cp_group = getattr(pg_collection, "cp", None)
        # Query-key layer scaling divides here and multiplies again in the softmax, which cancels in fp32.
        self._scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._dim = kwargs.get("k_channels") or config.kv_channels
        self._v_dim = kwargs.get("v_channels") or self._dim
        self._windowed = window_of(config) is not None and is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self._caches: defaultdict[int, KeyCache] = defaultdict(KeyCache)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """query: [t, 1, heads, dim]; key, value: [t, 1, kv heads, dim]. Returns [t, 1, heads * dim].

        With multi-latent attention the inputs lack the 1. The mask is the plan's, whatever attention_mask says.
        Raises WlbError without a plan.
        """
        if not isinstance(packed_seq_params, WlbPackedSeqParams) or packed_seq_params.layout is None:
            raise WlbError(
                f"attention got {type(packed_seq_params).__name__} instead of the plugin's plan of the micro-batch: "
                "feed the model through wlb_megatron's forward_step"
            )
        if attention_bias is not None:
            raise WlbError("wlb_megatron does not support attention bias: train without it")
        if query.dim() != 3 and (query.dim() != 4 or query.shape[1] != 1):
            raise WlbError(
                f"attention got queries of shape {tuple(query.shape)}, not [tokens, 1, heads, dim]: "
                "a micro-batch is one packed sequence, as wlb_megatron's forward_step gives it"
            )
        out = sharded_attention(
            query,
            key,
            value,
            packed_seq_params.layout,
            packed_seq_params.group or self._group(),
            self.kernels[1],
            self._scale,
            LayerSettings(
                self.keep_keys,
                getattr(self, "softmax_offset", None),  # the parent's sink, of its softmax type
                self._windowed,
                self._caches[packed_seq_params.depth],
            ),
        )
        return out if query.dim() == 4 else out.flatten(1).unsqueeze(1)

    @functools.cached_property
    def kernels(self) -> tuple[str, Kernels]:
        """The name of the layer's kernels (of registry.KERNELS, or "torch"), and the kernels. WlbError if none fit the
        layer.
        """
        config = self.config
        layer = Layer(
            dim=self._dim,
            v_dim=self._v_dim,
            grouped=(config.num_query_groups or config.num_attention_heads) != config.num_attention_heads,
            dtype=str(config.params_dtype).removeprefix("torch."),
            capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
        )
        return _kernels(type(self), self.asked_kernels, bool(config.deterministic_mode), layer)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The key (with sizes) under which built kernels are cached, kernel name first. Layers of one kind share
        kernels.
        """
        return self.kernels[0], self._windowed, self._dim, self._v_dim, self._scale

    def warm_up(self, graphs: list[Warmable]) -> None:
        """Builds these kernels for this layer's heads, scale and recomputation."""
        config, tp = self.config, self.config.tensor_model_parallel_size
        warm_up(
            self.kernels[1],
            graphs,
            heads=(
                config.num_attention_heads // tp,
                max(1, (config.num_query_groups or config.num_attention_heads) // tp),
            ),
            dims=(self._dim, self._v_dim),
            scale=self._scale,
            dtype=config.params_dtype,
            device="cuda",
            recompute=config.recompute_granularity is not None,
        )

    def _group(self) -> Any:
        if self._cp_group is None:
            self._cp_group = parallel_state.get_context_parallel_group(check_initialized=False)
        return self._cp_group


@functools.cache
def _subclass(base: Any) -> type:
    return type(f"Wlb{base.__name__}", (WlbCoreAttention, base), {"__doc__": WlbCoreAttention.__doc__})


def wlb_core_attention(base: Any) -> type:
    """The plugin's subclass of a layer spec's core attention class (or of a ModuleSpec's module)."""
    cls = getattr(base, "module", base)
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise WlbError(
            f"core_attention of the layer spec is {base!r}, not a module class: use a GPT layer spec"
        )
    module: Any = cls
    return module if issubclass(module, WlbCoreAttention) else _subclass(module)


def _kernels(cls: type, choice: str, deterministic: bool, layer: Layer) -> tuple[str, Kernels]:
    if not any(base.__module__.startswith("transformer_engine.") for base in cls.__mro__):
        return "torch", TorchKernels()
    name, why = kernel_choice.chosen(choice, layer)
    if name == "cudnn":
        from wlb_megatron.attention.kernels.te_backend import refuse_unfit

        refuse_unfit(layer.dim, layer.capability)
    _say_once(f"attention of {layer.dim} channels a head: {kernel_choice.describe(name, why)}")
    # The same decision as in Transformer Engine's own attention.
    deterministic |= os.getenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
    return name, kernel_choice.kernels(name, deterministic or torch.are_deterministic_algorithms_enabled())


@functools.cache
def _say_once(line: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"> wlb_megatron: {line}", flush=True)


def window_of(config: Any) -> int | None:
    """Earlier keys that a query of a windowed layer attends to, or None if no layer has a window.

    config: with Megatron's window_size (left, right). A causal model attends to nothing on the right.
    """
    size = getattr(config, "window_size", None)
    return None if not size or size[0] < 0 else int(size[0])


def _refuse(
    config: Any,
    attn_mask_type: AttnMaskType,
    attention_type: str,
    attention_dropout: float | None,
    kwargs: dict[str, Any],
) -> None:
    """Raises WlbError that names what this attention does not support."""
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    keys, values = kwargs.get("k_channels"), kwargs.get("v_channels")
    for condition, what, cure in (
        (dropout > 0, f"attention dropout {dropout}", "set --attention-dropout 0"),
        (attention_type != "self", f"{attention_type} attention", "use a decoder-only model"),
        (
            attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal),
            f"mask type {attn_mask_type.name}",
            "use a causal language model",
        ),
        (
            getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False),
            "the maximum attention logit",
            "drop --qk-clip and --log-max-attention-logit",
        ),
        (
            getattr(config, "fp8_dot_product_attention", False)
            or getattr(config, "fp8_multi_head_attention", False),
            "FP8 attention",
            "keep attention in bf16",
        ),
        (
            (values or 0) > (keys or 0),
            f"values of {values} channels, wider than keys of {keys}",
            "give values at most the keys' channels",
        ),
    ):
        if condition:
            raise WlbError(f"wlb_megatron's attention does not handle {what}: {cure}")


HANDLED = ("RotaryEmbedding", "YarnRotaryEmbedding")


class PlannedRotaryEmbedding(nn.Module):
    """Replaces a model's (or an MLA layer's) `rotary_pos_emb`, and takes its frequencies from it.

    Megatron's packed RoPE assumes documents that are padded and cut in zigzag. Here each token has its own position.
    The wrapped module's own frequencies are evaluated at just these positions: no table, no cache, no clamp.

    inner: Megatron's RotaryEmbedding or YarnRotaryEmbedding, with any base, scaling, interpolation, percent and
    interleaving. packed: the layer drops the batch dimension of its queries, as MLA does. Raises WlbError for another
    class (multimodal RoPE has three positions per token).
    """

    def __init__(self, inner: nn.Module, is_packed: bool = False) -> None:
        super().__init__()
        if type(inner).__name__ not in HANDLED:
            raise WlbError(
                f"rotary embedding {type(inner).__name__} is not handled by wlb_megatron: "
                "use --position-embedding-type rope or yarn"
            )
        self.inner = inner
        self.packed = is_packed
        self._made: tuple[Tensor | None, Any] = None, None

    def get_rotary_seq_len(
        self,
        inference_context: Any = None,
        transformer: Any = None,
        transformer_input: Any = None,
        transformer_config: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """int32[t]: positions of this rank's tokens. (Megatron passes the result to forward.)"""
        layout = getattr(packed_seq_params, "layout", None)
        if layout is None:
            raise WlbError(
                f"rotary embedding got {type(packed_seq_params).__name__} instead of the plugin's plan of the "
                "micro-batch: feed the model through wlb_megatron's forward_step"
            )
        return layout.positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None, **_: Any) -> Any:
        """[t, 1, 1, dim] ([t, 1, dim] if packed): frequencies at `positions`.

        They equal the wrapped module's table there bitwise. With YaRN: a pair of them and its factor, as from
        Megatron's own.
        """
        if self._made[0] is not positions:  # else another layer of this micro-batch has made them
            # Megatron makes a table of arange(n) + offset; of n = 1 and the positions as offset it is just these rows.
            embedding: Any = self.inner.get_emb(1, offset=positions)  # type: ignore[operator]
            table, extras = (embedding[0], embedding[1:]) if isinstance(embedding, tuple) else (embedding, ())
            table = table.squeeze(2) if self.packed else table
            self._made = positions, (table, *extras) if extras else table
        return self._made[1]
