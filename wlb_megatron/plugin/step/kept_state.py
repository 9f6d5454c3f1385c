"""What a rehearsal changes besides gradients, kept and put back: training starts as if there had been none.

Random states; buffers, such as routers' counts of tokens; what FP8 with delayed scaling has learnt; and routers' and
multi-token losses that Megatron sums up for its next log line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class KeptState:
    """The state of a model's chunks and of this process when it is made."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        self._chunks = chunks
        self._tracker = get_cuda_rng_tracker()
        self._states = self._tracker.get_states()
        self._cpu, self._gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
        self._buffers = [(buffer, buffer.clone()) for chunk in chunks for _, buffer in chunk.named_buffers()]
        self._scales = {
            place: (state.scale.clone(), state.amax_history.clone()) for place, state in _delayed(chunks)
        }

    def restore(self) -> None:
        from megatron.training import get_args

        for buffer, before in self._buffers:
            buffer.copy_(before)
        if get_args().fp8:
            self._restore_scales()
        _forget_logged_losses()
        self._tracker.set_states(self._states)
        torch.set_rng_state(self._cpu)
        torch.cuda.set_rng_state(self._gpu)

    @torch.no_grad()
    def _restore_scales(self) -> None:
        """In place, because quantizers hold views. Those that were made since begin anew, as in a module's first pass;
        a history's rows may have become more or fewer (--fp8-amax-history-len at a resume)."""
        from wlb_megatron.attention.kernels.te_backend import delayed_scales

        for scale, history in delayed_scales():
            scale.fill_(1)
            history.zero_()
        for place, state in _delayed(self._chunks):
            if place in self._scales:
                scale, history = self._scales[place]
                rows = min(len(history), len(state.amax_history))
                state.scale.copy_(scale)
                state.amax_history[:rows].copy_(history[:rows])


def _delayed(chunks: Sequence[Any]) -> Iterator[tuple[tuple[int, str, str], Any]]:
    """Transformer Engine's states of delayed scaling (scale: fp32[n], amax_history: fp32[length, n]) by place.

    They are neither parameters nor buffers: a module has them in its fp8_meta from its first pass on, or since it was
    loaded from a checkpoint.
    """
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            meta = getattr(module, "fp8_meta", None) or {}
            for direction in ("scaling_fwd", "scaling_bwd"):
                state = meta.get(direction)
                if isinstance(getattr(state, "amax_history", None), Tensor):
                    yield (number, name, direction), state


def _forget_logged_losses() -> None:
    """Megatron adds up what layers record until it logs them."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # before 0.18
        from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker as clear
    else:
        clear = get_moe_metrics_tracker().clear
    clear()
    MTPLossLoggingHelper.tracker.clear()
