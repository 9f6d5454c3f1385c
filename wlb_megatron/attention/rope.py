"""Rotary frequencies at a plan's positions.

Megatron's packed RoPE assumes documents padded and cut in zigzag. Here each token brings its position, and the
frequencies are made for just these positions, from the wrapped module's own: no table, no cache, no clamp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wlb_megatron.errors import WlbError


class PlannedRotaryEmbedding(nn.Module):
    """Stands in for a model's `rotary_pos_emb` and takes its frequencies from it.

    inner: Megatron's RotaryEmbedding, with whatever base, scaling, interpolation, percent and interleaving.
    Raises WlbError for another class (YaRN and multimodal RoPE have another forward).
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        if type(inner).__name__ != "RotaryEmbedding":
            raise WlbError(
                f"rotary embedding {type(inner).__name__} is not handled by wlb_megatron: "
                "use --position-embedding-type rope"
            )
        self.inner = inner

    def get_rotary_seq_len(
        self,
        inference_context: Any = None,
        transformer: Any = None,
        transformer_input: Any = None,
        transformer_config: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """int32[t]: positions of this rank's tokens. (Megatron hands the result back to forward.)"""
        layout = getattr(packed_seq_params, "layout", None)
        if layout is None:
            raise WlbError(
                f"rotary embedding got {type(packed_seq_params).__name__} instead of the plugin's plan of the "
                "micro-batch: feed the model through wlb_megatron's forward_step"
            )
        return layout.positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None, **_: Any) -> Tensor:
        """[t, 1, 1, dim]: frequencies at `positions`, bitwise those of the wrapped module's table there."""
        inner: Any = self.inner
        if inner.inv_freq.device != positions.device:
            inner.inv_freq = inner.inv_freq.to(positions.device)
        at = positions.to(inner.inv_freq.dtype)
        if inner.seq_len_interpolation_factor is not None:
            at *= 1 / inner.seq_len_interpolation_factor
        frequencies = torch.outer(at, inner.inv_freq)
        if inner.rotary_interleaved:
            frequencies = frequencies.repeat_interleave(2, dim=-1)
        else:
            frequencies = torch.cat((frequencies, frequencies), dim=-1)
        return frequencies[:, None, None, :]
