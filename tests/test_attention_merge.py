"""Merging attention over two sets of keys, and its one-kernel form under Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from wlb_megatron.attention.merge import merge_into


def two_parts():
    torch.manual_seed(0)
    scores, values = torch.randn(7, 2, 10, dtype=torch.float64), torch.randn(10, 2, 4, dtype=torch.float64)

    def part(keys):
        s = scores[..., keys]
        return torch.einsum("thk,khd->thd", s.softmax(-1), values[keys]), torch.logsumexp(s, -1)

    return part(slice(0, 6)), part(slice(6, 10)), part(slice(0, 10))


def test_two_parts_merge_to_attention_over_all_keys():
    (out, lse), (part, part_lse), (whole, whole_lse) = two_parts()
    merge_into(out, lse, part, part_lse)
    assert torch.allclose(out, whole, atol=1e-14) and torch.allclose(lse, whole_lse, atol=1e-14)


def test_a_part_without_keys_weighs_nothing_on_either_side():
    (out, lse), (part, part_lse), _ = two_parts()
    before = out.clone(), lse.clone()
    merge_into(out, lse, torch.zeros_like(part), torch.full_like(part_lse, float("-inf")))
    assert torch.equal(out, before[0]) and torch.equal(lse, before[1])
    nothing, none = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    merge_into(nothing, none, part, part_lse)
    assert torch.equal(nothing, part) and torch.equal(none, part_lse)
    empty, none = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    merge_into(empty, none, torch.zeros_like(out), none.clone())
    assert torch.equal(empty, torch.zeros_like(out)) and torch.isinf(none).all()


def test_the_fused_kernel_does_the_same():
    pytest.importorskip("triton")
    code = """
import torch
from wlb_megatron.attention.merge import merge_into
from wlb_megatron.attention.merge_triton import merge_into as fused
torch.manual_seed(0)
for dim in (64, 96, 128):
    out, part = torch.randn(37, 3, dim), torch.randn(37, 3, dim)
    lse, part_lse = 3 * torch.randn(37, 3), 3 * torch.randn(37, 3)
    part_lse[3], lse[5] = float("-inf"), float("-inf")
    expected, expected_lse = out.clone(), lse.clone()
    merge_into(expected, expected_lse, part, part_lse)
    fused(out, lse, part, part_lse)
    assert (out - expected).abs().max() < 1e-5 and (lse - expected_lse).abs().max() < 1e-5
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
