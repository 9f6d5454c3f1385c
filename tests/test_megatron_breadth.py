"""A model of windows, sinks, YaRN-free RoPE gaps and recomputation through Megatron's loop, context parallel."""

import pytest
from megatron_runs import check_alike, flags, train, whole_gradients

pytestmark = pytest.mark.megatron

BREADTH = """--window-size 9,0 --window-attn-skip-freq 2 --softmax-type learnable --no-rope-freq 2
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--global-batch-size 4 --train-iters 2"""


def test_windows_sinks_and_recomputation_over_two_ranks_equal_one(corpus, single, tmp_path):
    arguments = flags(f"--data-path {corpus}", BREADTH, "--wlb-sharding per-document", context=2)
    check_alike(single(BREADTH), train(arguments, 2, tmp_path), 2)
    assert any(name.endswith("softmax_offset") for name in whole_gradients(single(BREADTH)))
