"""A model of windows, sinks, YaRN-free RoPE gaps and recomputation through Megatron's loop, context parallel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_runs import flags, mean_losses, train, whole_gradients
from test_megatron_layouts import RUN

pytestmark = pytest.mark.megatron

BREADTH = """--window-size 9,0 --window-attn-skip-freq 2 --softmax-type learnable --no-rope-freq 2
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""


def test_windows_sinks_and_recomputation_over_two_ranks_equal_one(corpus: Path, tmp_path: Path) -> None:
    arguments = [*RUN, "--data-path", str(corpus), *BREADTH.split()]
    single = train([*flags(), *arguments], 1, tmp_path / "single")
    ranks = train([*flags(context=2), *arguments, "--wlb-sharding", "per-document"], 2, tmp_path / "two")
    assert mean_losses(ranks, 2) == pytest.approx(mean_losses(single, 2), rel=1e-6)
    expected, gradients = whole_gradients(single), whole_gradients(ranks)
    assert any(name.endswith("softmax_offset") for name in expected)
    for name, gradient in expected.items():
        error = torch.linalg.norm(gradients[name] - gradient) / torch.linalg.norm(gradient)
        assert error <= 1e-5, f"{name}: {error:.2e}"
