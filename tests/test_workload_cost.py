"""What a document costs, by hand."""

import numpy as np
import pytest

from wlb_megatron.workload.cost_model import (
    UNITS_PER_TOKEN,
    CostModel,
    document_cost,
    latent_parameters,
    quadratic_at,
    with_windows,
)
from wlb_megatron.workload.model import Model

SEVEN_BILLION = Model(hidden=4096, ffn=11008, layers=1, heads=32, kv_heads=32).layer_parameters


def test_work_is_linear_and_quadratic_and_whole_and_beyond_32_bits_exact_enough_and_positive():
    assert (CostModel(4.0).work([0, 4, 8]) == np.array([0, 8, 24]) * UNITS_PER_TOKEN).all()
    assert CostModel(4.0).work([4]).dtype == np.int64
    assert CostModel(24576.0).work([2**20])[0] == (2**20 + 2**40 // 24576) * UNITS_PER_TOKEN + 683


def test_two_short_documents_cost_about_half_of_one_as_long_as_both():
    """Pairs of tokens that see each other: 1,024 * 1,025 / 2 against twice 512 * 513 / 2."""
    model = CostModel(1e-6)  # attention alone
    one, two = model.work([1024])[0], 2 * model.work([512])[0]
    assert one / two == pytest.approx(2.0, rel=1e-3)


def test_four_hundred_tiny_documents_do_not_look_free():
    cost = document_cost(3800, SEVEN_BILLION)
    assert cost == pytest.approx(4.1, abs=0.1)
    plain, counted = CostModel(3e4).work([20] * 400).sum(), CostModel(3e4, cost).work([20] * 400).sum()
    assert counted - plain == pytest.approx(400 * cost * UNITS_PER_TOKEN, rel=1e-3)
    assert CostModel(3e4, cost).work([0])[0] == 0


def test_attention_of_a_seven_billion_model_equals_the_rest_at_thirty_thousand_tokens():
    assert quadratic_at(4096, SEVEN_BILLION) == pytest.approx(29645, abs=1)


@pytest.mark.parametrize(("at", "document"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1.0, -1.0)])
def test_costs_that_make_no_sense_are_refused(at, document):
    with pytest.raises(ValueError, match="must"):
        CostModel(at, document)


def test_weights_of_multi_latent_attention_are_those_of_deepseek_v3():
    assert latent_parameters(7168, 128, 1536, 512, (128, 64, 128)) == pytest.approx(187e6, rel=0.01)
    # Queries not compressed: 16 heads of 192 from 2048, keys from rank 512.
    plain = latent_parameters(2048, 16, 0, 512, (128, 64, 128))
    assert plain == 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048


def test_windowed_layers_make_work_linear():
    assert with_windows(24_000, 0, 1.0) == 24_000
    assert with_windows(24_000, 1_000, 0.5) == 50_000
    only_windows = CostModel(with_windows(24_000, 1_000, 0.0))
    long, short = only_windows.work([131_072, 1_024])
    assert long == pytest.approx(128 * short, rel=1e-4)
