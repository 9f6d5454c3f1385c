"""Whether a token's loss weighs the same in every step: --wlb-token-weights."""

from __future__ import annotations

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.packer import Packer
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker


def weighs_equally(config: WlbConfig, packer: Packer) -> bool:
    """auto: where documents may wait. Those train in fuller steps, so a mean over the step's tokens would give their
    tokens less weight. Measured: docs/measured.md, equal weights of tokens."""
    if config.token_weights == "auto":
        return isinstance(packer, VarlenPacker) and packer.longest_delay > 0
    return config.token_weights == "equal"
