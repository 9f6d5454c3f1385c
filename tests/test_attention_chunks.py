"""Attention of documents in chunks against whole documents one at a time: outputs and gradients, in fp64."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from attention_oracle import SCALE, Member, ThreadGroup, cached_bytes, largest_error, one_document_at_a_time
from chunk_oracle import Iteration, Layer, WithRoomToSpare, iterations, shard_plans
from forked_ranks import spawn
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_runs import free_port

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.kv_exchange import KeyCache, clear_caches
from wlb_megatron.attention.sharded_attention import LayerSettings, sharded_attention
from wlb_megatron.pipeline.orders import grouped_orders, groups
from wlb_megatron.plan import Piece
from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding.attention_calls import attention_layout

EXACT = 1e-10
SINK = torch.randn(4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def assert_exact(iteration, layer, **shape):
    x = iteration.tensors(seed=iteration.tokens, **shape)
    got = iteration.on_all_ranks(x, layer)
    expected = one_document_at_a_time(iteration.lengths, x, window=layer.window, sink=layer.sink)
    assert largest_error(got, expected) < EXACT


@pytest.mark.parametrize("kind", SHARDINGS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_chunks_equal_whole_documents_with_any_heads_windows_sinks_and_recomputation(kind, data):
    """Heads: as many keys' as queries', grouped, one. Values of 3 channels beside keys of 4, as in latent attention."""
    micro_batches = data.draw(iterations(most=data.draw(st.sampled_from([3, 60]))))
    iteration = Iteration(*shard_plans(micro_batches, data.draw(st.sampled_from([1, 2, 3, 4])), kind))
    layer = Layer(
        window=data.draw(st.sampled_from([None, None, None, 0, 1, 5, 30, 1000])),
        sink=data.draw(st.sampled_from([None, SINK])),
        keep_keys=data.draw(st.booleans()),
        recompute=data.draw(st.sampled_from([None, "reentrant", "recorded"])),
        kernels=data.draw(st.sampled_from([TorchKernels(), WithRoomToSpare()])),
    )
    shape = data.draw(st.sampled_from([{"kv_heads": 4}, {"kv_heads": 2}, {"kv_heads": 1}, {"v_dim": 3}]))
    assert_exact(iteration, layer, **shape)


# Documents 0 and 1 in two and three chunks, which do not share a micro-batch; others whole beside them.
TWO_GROUPS = [
    [Piece(0, 0, 0, 24), Piece(0, 5, 0, 4)],
    [Piece(0, 6, 0, 6), Piece(0, 0, 24, 40, 24)],
    [Piece(0, 1, 0, 30)],
    [Piece(0, 7, 0, 3), Piece(0, 1, 30, 50, 30), Piece(0, 8, 0, 5)],
    [Piece(0, 1, 50, 64, 50), Piece(0, 9, 0, 2)],
    [Piece(0, 10, 0, 20)],
]


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("cp", [1, 2])
def test_backwards_run_last_first_within_a_group_while_the_next_group_goes_forward(stage, cp):
    padded, plans = shard_plans(TWO_GROUPS, cp, "per-document")
    assert groups(padded) == (2, 3, 1)
    order = [(step.micro_batch, step.backward) for step in grouped_orders(3, (2, 3, 1))[stage]]
    assert_exact(Iteration(padded, plans), Layer(order=order))
    assert_exact(Iteration(padded, plans), Layer(order=order, recompute="reentrant"))


def one_rank(iteration, layer, dtype=torch.float64, **shape):
    x = iteration.tensors(dtype=dtype, **shape)
    return iteration.on_rank(0, Member(ThreadGroup(1), 0), x, layer, KeyCache())


@pytest.mark.parametrize("recompute", [None, "reentrant"])
def test_keys_stay_once_from_the_first_chunks_forward_to_its_backward_and_their_gradients_in_fp32(recompute):
    """And keys of whole documents, and of last chunks, do not stay."""
    iteration = Iteration(*shard_plans(TWO_GROUPS, 1, "per-document"))
    *_, held = one_rank(iteration, Layer(recompute=recompute), torch.bfloat16)
    token = 2 * 2 * 4 * 2  # key and value of 2 heads of 4, 2 bytes each
    forwards = [24, 24, 54, 74, 74, 74]
    # Backwards 5 4 3 2 1 0: a chunk's keys, and in fp32 the gradients of those before it, until their own is done.
    backwards = [74, 3 * 50 + 24, 3 * 30 + 24, 24, 3 * 24, 0]
    assert held == [token * rows for rows in forwards + backwards]


def test_windowed_layers_keep_the_keys_inside_a_window_alone():
    iteration = Iteration(*shard_plans(TWO_GROUPS, 1, "per-document"))
    *_, held = one_rank(iteration, Layer(window=5))
    token = 2 * 2 * 4 * 8
    assert [rows // token for rows in held] == [5, 5, 10, 15, 15, 15, 15, 20, 15, 5, 10, 0]


@pytest.mark.parametrize("kind", ["per-document", "hybrid"])
@pytest.mark.parametrize("window", [None, 20])
def test_a_token_changed_in_an_early_chunk_changes_later_tokens_of_its_document_alone(kind, window):
    iteration = Iteration(*shard_plans(TWO_GROUPS, 2, kind))
    x, layer = iteration.tensors(), Layer(window=window)
    before = iteration.on_all_ranks(x, layer)
    # Document 1 begins after documents 0, 5 and 6; its tenth token is of its first chunk.
    begin = sum(iteration.lengths[:3])
    assert iteration.lengths[3] == 64
    for tensor in (x.q, x.k, x.v):
        tensor[begin + 9] += 1.0
    after = iteration.on_all_ranks(x, layer)
    end = begin + (64 if window is None else 9 + window + 1)
    changed = [(a != b).flatten(1).any(1) for a, b in zip(before, after, strict=True)]
    assert torch.equal(changed[0].nonzero().flatten(), torch.arange(begin + 9, end))
    for other in changed[1:]:  # gradients of earlier tokens change, too, as the softmax of later ones does
        assert not other[:begin].any() and not other[begin + 64 :].any()
        assert other[begin : begin + 64].any()


def test_error_in_bf16_hardly_grows_with_the_number_of_chunks():
    """Gradients from later chunks are summed in fp32; rounded once more at the end."""
    errors = {}
    for count in (1, 2, 5, 16):
        size = 480 // count
        pieces = [[Piece(0, 0, size * at, size * (at + 1), size * at)] for at in range(count)]
        iteration = Iteration(*shard_plans(pieces, 1, "per-document"))
        got = iteration.on_all_ranks(iteration.tensors(dtype=torch.bfloat16, dim=16), Layer())
        exact = one_document_at_a_time([480], iteration.tensors(dim=16))
        errors[count] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)]
    assert max(errors[16]) < 1.6 * max(errors[1]), errors
    assert 1e-4 < max(errors[1]) < 1e-2, errors


def test_every_row_is_written_where_new_memory_is_full_of_nan():
    iteration = Iteration(*shard_plans(TWO_GROUPS, 2, "per-document"))
    x = iteration.tensors()
    expected = iteration.on_all_ranks(x, Layer(kernels=WithRoomToSpare()))
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        got = iteration.on_all_ranks(x, Layer(kernels=WithRoomToSpare()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_failed_step_leaves_nothing_behind_once_caches_are_cleared():
    padded, plans = shard_plans(TWO_GROUPS, 1, "per-document")
    iteration = Iteration(padded, plans)
    cache, x = KeyCache(), iteration.tensors()
    member = Member(ThreadGroup(1), 0)
    with pytest.raises(AssertionError):
        iteration.on_rank(0, member, x, Layer(order=[(0, False), (1, False)]), cache)
    assert cached_bytes() == cached_bytes([cache]) > 0
    clear_caches()
    assert cached_bytes() == cached_bytes([cache]) == 0
    # And the next step is as if nothing had been.
    again, fresh = (
        [tensor for row in iteration.on_rank(0, member, x, Layer(), keys)[0] for tensor in row]
        for keys in (cache, KeyCache())
    )
    assert all(torch.equal(a, b) for a, b in zip(again, fresh, strict=True))


BEFORE_LATER = "backward of micro-batch 0 before that of 1 later ones that see its keys"
KEEPS_NONE = "micro-batch 1 sees keys of micro-batch 0, of which the layer keeps none"


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([(0, False), (1, False), (0, True)], BEFORE_LATER),
        ([(1, False)], KEEPS_NONE),
        ([(0, False), (0, True), (1, False)], KEEPS_NONE),
    ],
    ids=["backwards in order", "a step without the first chunk", "backward before the last chunk's forward"],
)
def test_an_order_that_would_lose_keys_or_gradients_is_refused(order, says):
    iteration = Iteration(*shard_plans(TWO_GROUPS, 1, "per-document"))
    with pytest.raises(RuntimeError, match=says):
        one_rank(iteration, Layer(order=order))


def test_a_chunk_without_a_cache_is_refused():
    plan = shard_plans(TWO_GROUPS, 1, "per-document")[1][1]
    layout = device_layout(attention_layout(plan, 0), "cpu")
    x = Iteration(*shard_plans([[Piece(0, 0, 0, 22)]], 1, "per-document")).tensors()
    with pytest.raises(ValueError, match="needs the layer's cache"):
        sharded_attention(x.q, x.k, x.v, layout, None, TorchKernels(), SCALE)


def test_micro_batches_of_whole_documents_leave_the_cache_alone():
    plan = shard_plans(TWO_GROUPS, 1, "per-document")[1][5]
    layout = device_layout(attention_layout(plan, 0, 3), "cpu")
    assert layout.cache is None and layout.window.cache is None
    x = Iteration(*shard_plans([[Piece(0, 0, 0, 20)]], 1, "per-document")).tensors()
    sharded_attention(
        x.q, x.k, x.v, layout, None, TorchKernels(), SCALE, LayerSettings(cache=(cache := KeyCache()))
    )
    assert not cache._entries and not cache._recorded


def test_keys_of_a_prefix_travel_only_to_ranks_that_lack_them():
    """[0, 32) then [32, 48) over two ranks: 8 rows each way for the first; then each rank sends its 16 of the prefix,
    and its share of the new 16 as ever: 8 to the one that holds [32, 36) and [44, 48), 4 to the other."""
    iteration = Iteration(*shard_plans([[Piece(0, 0, 0, 32)], [Piece(0, 0, 32, 48, 32)]], 2, "per-document"))
    group, x = ThreadGroup(2), iteration.tensors()

    def run(rank):
        iteration.on_rank(rank, Member(group, rank), x, Layer(), KeyCache())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    first, second = 16 + 8, 16 + 16 + 8 + 4
    # Gradients come back; keys that came from a prefix are not saved, but travel again in backward.
    assert group.traffic == 2 * first + 3 * second


def compare_in_processes(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for kind in SHARDINGS:
        iteration = Iteration(*shard_plans(TWO_GROUPS, 2, kind))
        x = iteration.tensors()
        expected = one_document_at_a_time(iteration.lengths, x)
        for recompute in (None, "reentrant", "recorded"):
            results, *_ = iteration.on_rank(rank, dist.group.WORLD, x, Layer(recompute=recompute), KeyCache())
            for rows, *tensors in results:
                wanted = [tensor[rows] for tensor in expected]
                assert largest_error(tensors, wanted) < EXACT, (kind, recompute)
    dist.destroy_process_group()


def test_two_real_processes_get_what_whole_documents_give():
    spawn(compare_in_processes, (free_port(),), 2)
