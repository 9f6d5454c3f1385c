"""Rotary frequencies at the plan's positions, against Megatron's own module."""

import numpy as np
import pytest
import torch
from attention_oracle import padded
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from wlb_megatron.attention.core_attention import PlannedRotaryEmbedding, packed_seq_params
from wlb_megatron.errors import WlbError
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import shard

VARIANTS = {
    "plain": {},
    "partial": {"rotary_percent": 0.5},
    "interleaved": {"rotary_interleaved": True},
    "interpolated": {"seq_len_interpolation_factor": 3.0},
    "llama 3": {"rope_scaling": True, "rope_scaling_factor": 8.0, "rotary_base": 500000},
}
VARIANTS["all"] = {"rotary_percent": 0.25, "rotary_interleaved": True, "rope_scaling": True}
VARIANTS["all"] |= {"seq_len_interpolation_factor": 2.5}


@pytest.fixture(autouse=True)
def megatron_moves_frequencies_to_this_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def rotary(**options):
    return RotaryEmbedding(32, options.pop("rotary_percent", 1.0), use_cpu_initialization=True, **options)


def frequencies(inner, plan, rank):
    planned = PlannedRotaryEmbedding(inner)
    params = packed_seq_params(attention_layout(plan, rank), "cpu")
    length = planned.get_rotary_seq_len(None, None, None, None, params)
    return planned(length, packed_seq=False, cp_group=None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_document_on_one_rank_gets_megatrons_own_table_bitwise(variant):
    inner = rotary(**VARIANTS[variant])
    got = frequencies(inner, shard([5000], 1, "per-document"), 0)
    expected = inner(5000)
    assert got.shape == (5000, 1, 1, expected.shape[-1])
    assert torch.equal(got, expected)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6), cp=st.sampled_from([1, 2, 4]))
def test_every_token_gets_the_row_of_its_position_in_its_document(lengths, cp):
    lengths = padded(lengths, cp)
    inner = rotary()
    table = inner(512)
    where = np.concatenate([np.arange(n) for n in lengths])
    for kind in ("per-sequence", "per-document"):
        plan = shard(lengths, cp, kind)
        for rank in range(cp):
            assert torch.equal(frequencies(inner, plan, rank), table[where[plan.packed_index(rank)]])


def test_a_later_document_starts_at_position_zero_and_a_longer_table_does_not_run_across_documents():
    """Documents of 8 and 16 tokens, CP=2: rank 0 holds 0 1 6 7 of the first and 0..3 12..15 of the second."""
    layout = attention_layout(shard([8, 16], 2, "per-document"), 0)
    positions = packed_seq_params(layout, "cpu").layout.positions
    assert positions.tolist() == [0, 1, 0, 1, 2, 3, 6, 7, 12, 13, 14, 15]
    inner = rotary()
    inner(8)  # Megatron has cached a table of the packed length
    got = frequencies(inner, shard([4, 4], 1, "per-document"), 0)
    assert torch.equal(got[4:], got[:4])
    assert torch.equal(got[:4], inner(8)[:4])


def test_rotated_keys_of_a_document_do_not_depend_on_what_it_is_packed_with():
    inner = rotary()
    x = torch.randn(9, 1, 2, 32)
    alone = _apply_rotary_pos_emb_bshd(x, frequencies(inner, shard([9], 1, "per-document"), 0))
    packed = frequencies(inner, shard([5, 9], 1, "per-document"), 0)
    assert torch.equal(_apply_rotary_pos_emb_bshd(x, packed[5:]), alone)


def test_another_rotary_class_and_a_missing_plan_are_refused_and_wrapping_adds_no_checkpoint_keys():
    with pytest.raises(WlbError, match="use --position-embedding-type rope"):
        PlannedRotaryEmbedding(torch.nn.Identity())
    with pytest.raises(WlbError, match="instead of the plugin's plan"):
        PlannedRotaryEmbedding(rotary()).get_rotary_seq_len(None, None, None, None, None)
    assert PlannedRotaryEmbedding(rotary()).state_dict() == {}
