"""Rows added, and parts of attention merged, by owner; and their one-kernel forms under Triton's interpreter."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels.row_sums import (
    _in_sixteens,
    add_rows,
    grads_apart,
    merge_rows,
    side_by_side,
)
from wlb_megatron.sharding.attention_calls import RowGroups, row_groups


def groups(owner, rows):
    return device_layout(row_groups(np.array(owner), rows)[0], "cpu")


def test_row_groups_hold_source_rows_by_owner_and_of_several_targets_share_what_the_owners_count():
    grouped = groups([3, 0, 3], 4)
    assert grouped.targets.tolist() == [0, 3]
    assert grouped.bounds.tolist() == [0, 1, 3]
    assert grouped.members.tolist() == [1, 0, 2]
    # Owners 3 0 3 of two targets of 2 rows: row 0 of the first has source row 1, row 1 of the second 0 2.
    both = device_layout(row_groups(np.array([3, 0, 3]), 2, 2), "cpu")
    lists = [[x.tolist() for x in (one.targets, one.bounds, one.members)] for one in both]
    assert lists == [[[0], [0, 1], [1]], [[1], [0, 2], [0, 2]]]
    source = torch.tensor([[1.0], [10.0], [100.0]])
    for part, expected in zip(both, ([10.0, 0.0], [0.0, 101.0]), strict=True):
        add_rows(target := torch.zeros(2, 1), source, part)
        assert target.flatten().tolist() == expected


def test_rows_are_added_in_fp32_and_rounded_once():
    target = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    source = torch.ones(4, 1, dtype=torch.bfloat16)
    add_rows(target, source, groups([0, 0, 0, 1], 2))
    # One by one in bf16, 256 + 1 stays 256; together it is 259, nearest 260.
    assert target.flatten().tolist() == [260.0, 2.0]


def test_parts_merge_to_attention_over_all_keys():
    torch.manual_seed(0)
    scores, values = torch.randn(5, 2, 12, dtype=torch.float64), torch.randn(12, 2, 4, dtype=torch.float64)

    def part(keys, rows=slice(None)):
        s = scores[rows][..., keys]
        return torch.einsum("thk,khd->thd", s.softmax(-1), values[keys]), torch.logsumexp(s, -1)

    out, lse = part(slice(0, 6))
    untouched = out[4].clone()
    # Rows 0..3 see keys 6..8 too, rows 1 and 3 also keys 9..11.
    first, second = part(slice(6, 9), [0, 1, 2, 3]), part(slice(9, 12), [3, 1])
    parts = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    merge_rows(out, lse, *parts, groups([0, 1, 2, 3, 3, 1], 5))
    for rows, keys in (([4], 6), ([0, 2], 9), ([1, 3], 12)):
        expected, expected_lse = part(slice(0, keys), rows)
        assert torch.allclose(out[rows], expected, atol=1e-14)
        assert torch.allclose(lse[rows], expected_lse, atol=1e-14)
    assert torch.equal(out[4], untouched)


def test_the_fused_kernels_do_the_same():
    pytest.importorskip("triton")
    code = """
import numpy as np, torch
from wlb_megatron.sharding.attention_calls import RowGroups, row_groups
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels import row_sums, row_sums_triton
torch.manual_seed(0)
(groups,) = device_layout(row_groups(np.random.default_rng(0).integers(0, 30, 50), 37), "cpu")
for heads, dim in ((3, 64), (3, 96), (16, 128), (1, 256)):
    out, lse = torch.randn(37, heads, dim), 3 * torch.randn(37, heads)
    parts, parts_lse = torch.randn(50, heads, dim), 3 * torch.randn(50, heads)
    expected, expected_lse = out.clone(), lse.clone()
    row_sums.merge_rows(expected, expected_lse, parts, parts_lse, groups)
    row_sums_triton.merge_rows(out, lse, parts, parts_lse, groups)
    assert (out - expected).abs().max() < 1e-5 and (lse - expected_lse).abs().max() < 1e-5
    expected = out.clone()
    row_sums.add_rows(expected.flatten(1), parts.flatten(1), groups)
    row_sums_triton.add_rows(out.flatten(1), parts.flatten(1), groups, parts)
    assert (out - expected).abs().max() < 1e-5
    # Two targets of what the owners count, the second in fp32 beside a source in bf16, as cached keys' gradients are.
    both = device_layout(row_groups(np.random.default_rng(1).integers(0, 30, 50), 20, 17), "cpu")
    for part, rows, target in zip(both, (20, 17), (out.bfloat16(), out)):
        expected = target[:rows].flatten(1).clone()
        again, source = expected.clone(), parts.flatten(1).bfloat16()
        row_sums.add_rows(expected, source, part)
        row_sums_triton.add_rows(again, source, part, source)
        assert (again - expected).abs().max() < (1e-5 if rows == 17 else 0.1)
        assert not torch.equal(expected, target[:rows].flatten(1))
    index = torch.tensor([3, 0, 36, 3], dtype=torch.int32)
    sources = out, out.bfloat16()[..., :40].contiguous(), lse.double(), torch.randn(37, 1, 5)
    for source, spread in zip(sources, row_sums_triton.spread_four(sources, index, 6), strict=True):
        assert spread.shape == (6, *source.shape[1:]) and torch.equal(spread[:4], source[index])
# Rows of two sources: what a rank holds, and what arrives.
place = torch.tensor([2, ~0, 1, ~3, ~1, 0, ~2], dtype=torch.int32)
for shape in ((2, 3, 64), (2, 1, 5), (2, 8, 160)):
    held, arrived = torch.randn(3, *shape).bfloat16(), torch.randn(4, *shape).bfloat16()
    held[0] = -0.0
    expected = torch.stack([arrived[~at] if at < 0 else held[at] for at in place.tolist()])
    for function in (row_sums.join_rows, row_sums_triton.join_rows):
        joined = function(held, arrived, place, 9)
        assert joined.shape == (9, *shape) and torch.equal(joined[:7].view(torch.int16), expected.view(torch.int16))
    members = [2, ~0, 1, ~3, ~1, 0, ~2]
    groups = RowGroups(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [0, 1, 4, 7], members)))
    wide = torch.stack([sum(expected[n].double() for n in run) for run in ([0], [1, 2, 3], [4, 5, 6])])
    for function in (row_sums.sum_pairs, row_sums_triton.sum_pairs):
        for half, sums in enumerate(function(held, groups, arrived)):
            assert sums.dtype == torch.bfloat16 and sums.is_contiguous()
            assert (sums.double() - wide[:, half]).abs().max() <= wide.abs().max() / 128  # the interpreter cuts off
    again = held.clone()
    row_sums_triton.add_rows(again, held, groups, arrived)
    assert (again.double() - wide - held.double()).abs().max() <= (wide.abs().max() + held.abs().max()) / 128
for function in (row_sums.join_rows, row_sums_triton.join_rows):
    assert function(held, held[:0], place[:0], 0).shape == (0, 2, 8, 160)
    assert torch.equal(function(held, held[:0], torch.tensor([1], dtype=torch.int32), 1), held[1:2])
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_index_tensors_begin_where_triton_need_not_compile_anew():
    """Lengths 3, 1 and 5 of one copy: each begins at a multiple of four numbers, 16 bytes."""
    arrays = [np.arange(3), np.array([7]), np.arange(5)]
    made = device_layout(RowGroups(*arrays), "cpu")
    first, *shipped = made.targets, made.bounds, made.members
    assert [x.data_ptr() - first.data_ptr() for x in shipped] == [16, 32]
    for array, tensor in zip(arrays, [first, *shipped], strict=True):
        assert tensor.dtype == torch.int32 and tensor.tolist() == array.tolist()


def test_a_compiled_kernel_is_launched_again_only_for_what_it_was_compiled_for(monkeypatch):
    pytest.importorskip("triton")
    from wlb_megatron.attention.kernels import row_sums_triton

    class Kernel:
        """Compiles when called as Triton's, and notes what is launched either way."""

        function, packed_metadata = "function", "metadata"

        def __init__(self):
            self.compiled, self.launched = [], []

        def __getitem__(self, grid):
            return lambda *arguments, num_warps: self.compiled.append((grid, arguments)) or self

        def run(self, *arguments):
            self.launched.append(arguments)

    kernel, rows = Kernel(), torch.zeros(8, dtype=torch.int32)
    monkeypatch.setattr(row_sums_triton, "_compiled", {})
    monkeypatch.setattr(row_sums_triton, "_STRAIGHT", True)
    active = SimpleNamespace(get_current_stream=lambda place: "stream")
    monkeypatch.setattr(row_sums_triton, "driver", SimpleNamespace(active=active))
    for grid, tensor, number in (
        ((2, 1), rows, 16),
        ((3, 1), rows, 16),  # the same kernel, another grid
        ((2, 1), rows, 17),
        ((2, 1), rows.long(), 16),
        ((2, 1), rows[1:], 16),  # not at a multiple of 16 bytes: compiled apart, and never kept
        ((2, 1), rows[1:], 16),
        ((2, 1), rows[4:], 16),
    ):
        row_sums_triton._launch(kernel, grid, (tensor,), (number,))
    assert len(kernel.compiled) == 5
    assert [arguments[:6] for arguments in kernel.launched] == [
        (3, 1, 1, "stream", "function", "metadata"),
        (2, 1, 1, "stream", "function", "metadata"),
    ]
    assert kernel.launched[0][6:9] == (None, None, None)
    assert kernel.launched[0][9] is rows and kernel.launched[0][10:] == (16,)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 8), (torch.bfloat16, 12), (torch.float64, 5)])
def test_keys_and_values_side_by_side_and_apart_again_are_bitwise_the_same(dtype, dim):
    """Copied in elements of 16 bytes where rows are whole ones (8 of bf16), in their own where not; v with strides."""
    mixed = torch.randn(7, 2, 4 * dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    k, v = mixed[..., :dim].contiguous(), mixed[..., 3 * dim :]
    assert not v.is_contiguous()
    kv = side_by_side(k, v)
    assert kv.is_contiguous() and torch.equal(kv, torch.stack((k, v), dim=1))
    dk, dv = grads_apart(kv, dim)
    assert torch.equal(dk, k) and torch.equal(dv, v) and dk.is_contiguous() and dv.is_contiguous()
    narrow = side_by_side(k, v[..., :3])
    assert [x.shape[-1] for x in grads_apart(narrow, dim)] == [dim, 3]


def test_keys_that_begin_between_16_bytes_are_copied_in_their_own_elements():
    """A tensor of another's memory: its storage begins where it does, so no offset tells."""
    held = np.zeros(2 * 3 * 8 * 2 + 4, dtype=np.float32)
    first = (16 - held.ctypes.data % 16) // 4 % 4 + 2
    k = torch.from_numpy(held[first : first + 3 * 2 * 8].reshape(3, 2, 8))
    assert k.data_ptr() % 16 == 8 and k.storage_offset() == 0
    assert not _in_sixteens(k) and _in_sixteens(torch.zeros(3, 2, 8))
    assert torch.equal(side_by_side(k, k + 1), torch.stack((k, k + 1), dim=1))
