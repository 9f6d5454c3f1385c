"""Computes rotary frequencies at a plan's positions.

Megatron's packed RoPE assumes documents that are padded and cut in zigzag. Here each token has its own position. The
wrapped module's own frequencies are evaluated at just these positions: no table, no cache, no clamp.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wlb_megatron.errors import WlbError

HANDLED = ("RotaryEmbedding", "YarnRotaryEmbedding")


class PlannedRotaryEmbedding(nn.Module):
    """Replaces a model's (or an MLA layer's) `rotary_pos_emb`, and takes its frequencies from it.

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
