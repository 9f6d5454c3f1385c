"""A profile: what the profiler measured of a model's shape on a GPU, and the costs fitted to it, as one JSON file."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb_megatron.errors import WlbError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    """Shape of a GPT's layers, in Megatron's arguments, and the layout it is measured for.

    hidden: hidden_size. ffn: ffn_hidden_size. heads: num_attention_heads. kv_heads: num_query_groups. head_dim:
    kv_channels. vocab: padded vocabulary. gated: swiglu. tp, cp: sizes of tensor and context parallelism. fused:
    gradients are added to fp32 ones inside the matrix products (gradient_accumulation_fusion).
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    tp: int = 1
    cp: int = 1
    fused: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "tp", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads or self.heads % self.tp or self.ffn % self.tp:
            raise ValueError(
                f"{self.heads} heads, {self.kv_heads} key-value heads and ffn {self.ffn} do not divide by each other "
                f"and by tensor parallel {self.tp}"
            )

    @property
    def rank_heads(self) -> int:
        return self.heads // self.tp

    @property
    def rank_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.tp)

    @property
    def layer_parameters(self) -> int:
        """Of one tensor-parallel rank."""
        attention = self.hidden * self.head_dim * 2 * (self.rank_heads + self.rank_kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn // self.tp


def fingerprint(told: dict[str, Any]) -> str:
    """Of settings and samples: two profiles with one fingerprint hold the same measurements."""
    text = json.dumps({"settings": told["settings"], "samples": told["samples"]}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def write_profile(path: Path, told: dict[str, Any]) -> None:
    """Write a profile, whole or not at all."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(
            json.dumps({**told, "fingerprint": fingerprint(told)}, indent=1) + "\n", encoding="utf-8"
        )
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise WlbError(f"cannot write {path}: {error.strerror}; give another --out") from None
