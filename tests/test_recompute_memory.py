"""What planned recomputation takes a stage to hold, what the law expects it to keep, how measurements correct it."""

import re
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_megatron.packing.limits import GpuMemory
from wlb_megatron.pipeline.kept_layers import KeptLayers, Load
from wlb_megatron.pipeline.step_law import StageRoom, StepLaw, most_held
from wlb_megatron.refusals import RefusedHere
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.workload.memory import (
    GIB,
    StageMemory,
    attended_bytes,
    busy_bytes,
    layer_bytes,
    layers_bytes,
    micro_batch_bytes,
    stage_memory,
    waiting_loss_bytes,
    weight_bytes,
    working_bytes,
)
from wlb_megatron.workload.model import DeltaNets, Experts, Layout, Model, symbols

TINY = Model(hidden=4, ffn=8, layers=4, heads=2, kv_heads=1, head_dim=2, vocab=16)
FULL = Layout(recompute="full", pipeline=2)
KEPT, INPUT = 32 + 24 + 8 + 48, 8
"""Of TINY: a layer's norms and inputs, queries with outputs, keys and values, feed-forward; and its input. Bytes."""


def only_chunk(layout: Layout, stage: int = 0, **more: int) -> object:
    (chunk,) = stage_memory(TINY, layout, stage, [4], **more).chunks
    return chunk


@pytest.mark.parametrize(("unit", "inputs"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_uniform_units_keep_one_input_each_and_blocks_one_of_each_layer(unit, inputs):
    chunk = only_chunk(replace(FULL, recompute_layers=unit))
    assert (chunk.layers, chunk.recomputed, chunk.kept, chunk.input) == (4, 4, KEPT, INPUT)
    assert (chunk.floor, chunk.switched) == (inputs * INPUT, (4 - inputs) * INPUT)
    assert chunk.remade == min(unit, 4) * KEPT


def test_blocks_keep_the_layers_that_the_flags_do_not_recompute():
    block = replace(FULL, recompute_block=True, recompute_layers=3)
    chunk = only_chunk(block)
    assert (chunk.recomputed, chunk.floor, chunk.switched) == (3, 3 * INPUT + KEPT, 0)
    assert chunk.remade == 0, "the backward begins with a kept layer, and frees it"
    every = only_chunk(replace(block, recompute_layers=9))
    assert (every.recomputed, every.floor, every.remade) == (4, 4 * INPUT, KEPT)


def test_blocks_keep_multi_token_predictions_layers_which_uniform_recomputes():
    assert only_chunk(FULL, 0, depths=2) == only_chunk(FULL), "they are on the last stage"
    chunk = only_chunk(FULL, 1, depths=2)
    assert (chunk.floor, chunk.switched) == (6 * INPUT, 2 * (KEPT - INPUT))
    block = only_chunk(replace(FULL, recompute_block=True, recompute_layers=4), 1, depths=2)
    assert (block.floor, block.switched, block.remade) == (4 * INPUT + 2 * KEPT, 0, 0)
    first, last = stage_memory(TINY, FULL, 1, [2, 2], depths=1).chunks
    assert (first.floor, last.floor) == (2 * INPUT, 3 * INPUT)
    assert (first.keyed, last.keyed) == (2, 3), "keys of documents in chunks, beside the layers'"


def test_a_hybrid_models_layers_hold_their_parts_of_a_whole_layer():
    attention, mlp = 16 + 24 + 8, 16 + 48
    layout = replace(FULL, context=2)
    keys = 2 * 2 * 2 * 2  # with those of the other rank
    (chunk,) = stage_memory(TINY, layout, 1, ["*--*"], depths="*-").chunks
    assert [layer.kept for layer in chunk.unlike] == [attention + keys, mlp, mlp, attention + keys]
    first = attention + keys - 8
    assert chunk.more() == [0, first, *(first + n * (mlp - 8) for n in (1, 2)), 2 * first + 2 * (mlp - 8)]
    assert (chunk.layers, chunk.keyed, chunk.floor) == (4, 3, 6 * INPUT)
    assert chunk.switched == attention + keys + mlp - 2 * INPUT, "of multi-token prediction"
    assert chunk.remade == mlp == attention + keys, "the largest layer"
    # Attention has 2 x 4 x 2 x (2 + 1) = 48 weights, an MLP 3 x 4 x 8 = 96: 288 are the work of two whole layers.
    assert [layer.linear for layer in chunk.unlike] == [333, 666, 666, 333]
    assert chunk.saved() == [(0, 0), (333, 1000), (999, 1000), (1665, 1000), (1998, 2000)]
    blocks = replace(layout, recompute_block=True, recompute_layers=3)
    (block,) = stage_memory(TINY, blocks, 0, ["*--*"]).chunks
    assert block.floor == 3 * INPUT + attention + keys and block.more()[1] == mlp - INPUT
    whole, parts = replace(TINY, layers=2), replace(TINY, layers="**--")
    for experts in (None, Experts(8, 6, shared=3)):
        whole = replace(whole, experts=experts)
        parts = replace(parts, layers="**--" if experts is None else "E*E*", experts=experts)
        assert weight_bytes(parts, FULL, 1) == weight_bytes(whole, FULL, 1)
        assert layers_bytes(symbols(parts.layers), parts, replace(FULL, recompute="none")) == (
            2 * layer_bytes(whole, FULL)
        )


def test_gated_delta_nets_hold_more_at_work_and_no_keys():
    """1 key head of 2, 2 value heads of 2: the convolution's input and output 2 x 8, normalized 2 x 2, repeated 2 x 4,
    five of 4, and 64 for each value head; 20 bytes a value head in fp32. At work rows of 16 twice, states of 8."""
    nets = DeltaNets(layers=2, key_heads=1, value_heads=2, key_dim=2, value_dim=2)
    shape = replace(TINY, delta_nets=nets)
    layout = replace(FULL, context=2)
    attention, mlp, keys = 16 + 24 + 8, 16 + 48, 2 * 2 * 2 * 2
    net = 16 + 2 * (16 + 4 + 8 + 20 + 128) + 20 * 2
    (chunk,) = stage_memory(shape, layout, 0, ["G-*G"]).chunks
    assert [layer.kept for layer in chunk.unlike] == [net, mlp, attention + keys, net]
    assert (chunk.layers, chunk.keyed, chunk.forward) == (4, 1, net + 2 * (2 * 16 + 0))
    # A net has 4 x (4 + 12 + 4) + 4 x 8 = 112 weights and 4 x 8 products more, attention 48, an MLP 96.
    assert [layer.linear for layer in chunk.unlike] == [1000 * w // 432 for w in (144, 96, 48, 144)]
    whole, parts = replace(shape, layers="NNT"), replace(shape, layers="G-*-G-")
    assert weight_bytes(whole, FULL, 1) == weight_bytes(parts, FULL, 1)
    dense = weight_bytes(replace(TINY, layers=3), FULL, 1)
    assert weight_bytes(whole, FULL, 1) - dense == 2 * (112 - 48) * 18
    assert layer_bytes(whole, FULL, symbol="N") == net + mlp


def test_exchanged_keys_are_kept_or_gathered_again():
    keys = 2 * 2 * 2 * 2  # two ranks' key and value of two channels in two bytes
    kept = only_chunk(replace(FULL, context=2))
    again = only_chunk(replace(FULL, context=2, keep_keys=False))
    assert (kept.kept, again.kept) == (KEPT + keys, KEPT)
    assert kept.working == KEPT + 2 * 4 * 2 + keys
    # Its attention is more: five rows of four channels, 16 bytes a channel for two ranks' keys, the keys gathered again
    # and their gradients, this rank's own; the feed-forward's 48 are free.
    assert again.working == 5 * 4 * 2 + 16 * 4 * 2 + 2 * keys + 2 * 4 * 2 - 48


def test_keys_for_later_chunks_are_held_with_their_fp32_gradients():
    memory = stage_memory(TINY, FULL, 1, [4])
    assert memory.keys == 2 * 2 * (2 + 4)
    rounded = 3 * 16 * 4 // 2  # gradients for both heads of queries
    assert memory.attended == attended_bytes(TINY, FULL) + rounded
    wide = replace(TINY, kv_heads=2)
    assert stage_memory(wide, FULL, 1, [4]).attended == attended_bytes(wide, FULL)
    assert memory.loss > 0 == stage_memory(TINY, FULL, 0, [4]).loss
    in_forward = stage_memory(TINY, replace(FULL, losses_in_forward=True), 1, [4])
    assert in_forward.ends - memory.ends == 4 * 16, "the softmax in fp32"


def test_experts_hold_a_row_for_each_that_a_token_passes():
    routed = (3 * 6 + 4) * 2 * 2  # two of width 6 and an input each, in two bytes
    every = layer_bytes(TINY, FULL) - 3 * 8 * 2 + 8 * 12 + 2 * 30

    def with_experts(*sizes: int, layout: Layout = FULL, imbalance: int = 100, shared: int = 0) -> int:
        experts = Experts(8, 6, *sizes, imbalance=imbalance, shared=shared)
        return layer_bytes(replace(TINY, experts=experts), layout)

    assert with_experts() == every + routed
    assert with_experts(imbalance=150) == every + routed * 3 // 2
    (chunk,) = stage_memory(replace(TINY, experts=Experts(8, 6)), FULL, 0, [4]).chunks
    assert chunk.kept == every + routed * 3 // 2
    assert with_experts(shared=5) == every + routed + 3 * 5 * 2
    # Two tensor-parallel ranks cut experts and gather their inputs, or each has half of the tokens.
    both = replace(FULL, tensor=2, sequence=True)
    cut, apart = (with_experts(1, tensor, layout=both) for tensor in (2, 1))
    assert cut - apart == 4 // 2 * 2 * 2


def test_norms_of_queries_and_keys_keep_their_inputs():
    """Two heads of queries and one of keys, of two channels in two bytes; multi-latent attention's are counted."""
    normed, halved = replace(TINY, qk_norm=True), replace(FULL, tensor=2, sequence=True)
    assert layer_bytes(normed, FULL) == layer_bytes(TINY, FULL) + (2 + 1) * 2 * 2
    assert layer_bytes(normed, halved) == layer_bytes(TINY, halved) + (1 + 1) * 2 * 2
    latent = replace(TINY, projections=100)
    assert layer_bytes(replace(latent, qk_norm=True), FULL) == layer_bytes(latent, FULL)


def test_compressed_queries_and_keys_are_kept_with_the_inputs_of_their_norms_and_whole_on_each_rank():
    """Six channels in two bytes, of a token or of half as many; weights of 4 x 6 beside 76 that ranks share."""
    latent, halved = replace(TINY, projections=100, compressed=6), replace(FULL, tensor=2, sequence=True)
    for layout, tokens in ((FULL, 2), (halved, 1)):
        assert layer_bytes(latent, layout) == layer_bytes(TINY, layout) + 6 * 2 * tokens
    plain = replace(TINY, projections=100)
    shared = weight_bytes(latent, halved, 0) - weight_bytes(plain, halved, 0)
    assert shared == 4 * (24 - 24 // 2) * 18, "four layers, 18 bytes a parameter"
    assert weight_bytes(latent, FULL, 0) == weight_bytes(plain, FULL, 0)


def test_rows_that_experts_pass_on_are_at_work_where_layers_keep_less():
    """Two experts of a token, 100 channels in two bytes: 400 bytes sent. 600 arrive, and twice as many once more while
    outputs are sorted; of two ranks that gather their inputs, 200 + 300 + 2 x 600."""
    shape = replace(TINY, hidden=100, ffn=1, experts=Experts(2, 1, chosen=2))
    assert layer_bytes(shape, FULL) < busy_bytes(shape, FULL, "T") == 400 + 3 * 600
    assert busy_bytes(shape, FULL, "*") == layer_bytes(shape, FULL, "*")
    both, cut = replace(FULL, tensor=2, sequence=True), Experts(2, 1, tensor=2)
    assert busy_bytes(replace(shape, experts=cut), both, "E") == 200 + 300 + 2 * 600
    wide = replace(shape, experts=Experts(2, 900, chosen=2))
    assert busy_bytes(wide, FULL, "T") == layer_bytes(wide, FULL), "gradients of as much"


def test_recomputed_layers_with_experts_linger_with_input_and_gradient():
    """Megatron's dispatcher refers to their last forward. Blocks of three layers are recomputed, of two virtual stages
    those of both linger."""
    for layout, layers, lingering in (
        (FULL, [4], 4),
        (replace(FULL, recompute_block=True, recompute_layers=3), [4], 3),
        (replace(FULL, virtual=2), [2, 2], 4),
        (FULL, ["*E*-"], 1),
    ):
        routed = replace(TINY, experts=Experts(8, 6))
        first = stage_memory(routed, layout, 0, layers).chunks[0]
        alone = max(busy_bytes(routed, layout, symbol) for symbol in symbols(layers[0]))
        assert first.forward == alone + 2 * lingering * INPUT, (layout, layers)


@pytest.mark.parametrize("unit", [1, 2, 4])
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("keep", [True, False])
def test_by_the_flags_a_stage_holds_what_lmax_counts(unit, context, keep):
    layout = replace(FULL, recompute_layers=unit, context=context, keep_keys=keep)
    for stage in (0, 1):
        memory = stage_memory(TINY, layout, stage, [4])
        (chunk,) = memory.chunks
        kept = micro_batch_bytes(TINY, layout, stage) + waiting_loss_bytes(TINY, layout, stage)
        assert chunk.floor + memory.ends == kept
        assert max(chunk.working + chunk.remade, memory.loss) == working_bytes(TINY, layout, stage)


def test_what_recomputes_no_layers_has_nothing_to_plan():
    for how in ("none", "selective"):
        layout = replace(FULL, recompute=how)
        with pytest.raises(ValueError, match="no number of layers to plan"):
            stage_memory(TINY, layout, 0, [4])
        assert GpuMemory(GIB, TINY, layout, 64, 1).rooms() is None


def test_each_stage_has_its_own_layers_weights_and_room():
    gpu = GpuMemory(GIB, TINY, replace(FULL, context=2), 64, 1, margin=0.25, layers=((1, 2), (4, 4)))
    assert gpu.room == GIB * 3 // 4
    assert [chunk.layers for chunk in gpu.stage(0).chunks] == [1, 2]
    assert [chunk.layers for chunk in gpu.stage(0, [3]).chunks] == [3]
    assert gpu.weights(0) < gpu.weights(1)
    assert gpu.available(0) == gpu.room - gpu.weights(0)
    assert replace(gpu, size=1).available(0) == 0
    first, last = gpu.rooms() or ()
    assert first.available == 2 * gpu.available(0), "of tokens over both context ranks"
    assert first.more == 3 * (gpu.stage(0).chunks[0].kept - INPUT) and first.keys == 3 * gpu.stage(0).keys
    assert last.floor == 8 * INPUT + gpu.stage(1).ends
    first, last = replace(gpu, depths=2).rooms() or ()
    expected = 3 * gpu.stage(0).keys, 10 * gpu.stage(1).keys
    assert (first.keys, last.keys) == expected, "multi-token prediction's, too"


# --- the law ---

ROOM = StageRoom(available=100, floor=2, more=8, working=1, keys=3)


def test_a_room_keeps_what_is_left_over_the_floor_and_the_stage_with_the_least_room_decides():
    assert ROOM.kept(15, 10, chunked=False) == 500
    assert ROOM.kept(15, 10, chunked=True) == 125, "45 more bytes for keys"
    assert ROOM.kept(1, 1, chunked=False) == 1000
    assert ROOM.kept(60, 10, chunked=False) == 0
    law = StepLaw(pp=2, backward=(3, 1), again=1000)
    wide, none = replace(ROOM, available=10**6), replace(ROOM, available=0)
    works, tokens = [40] * 4, [5] * 4
    full = law.rank(works)
    assert replace(law, rooms=(wide, none)).rank(works, None, tokens) == full
    assert replace(law, rooms=(none, wide)).rank(works, None, tokens) == full
    assert replace(law, rooms=(wide, wide)).rank(works, None, tokens) == full * 3 // 4
    # The last stage holds fewer micro-batches than the first.
    law = StepLaw(pp=3)
    tokens = [5, 3, 4, 1]
    assert [most_held(tokens, (1,) * 4, law, stage) for stage in (0, 2)] == [12, 5]
    assert most_held(tokens, (2, 1, 1), law, 2) == 9


STEPS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 500)), min_size=1, max_size=16)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(1, 5), st.sampled_from((1000, 625, 250)), st.integers(0, 10**5), st.data())
def test_a_step_that_keeps_layers_is_never_longer_than_one_that_runs_the_flags(
    step, stages, again, available, data
):
    works, tokens = map(list, zip(*step, strict=True))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=16))
    groups = tuple(sizes[: len(works)]) if sum(sizes[: len(works)]) == len(works) else None
    flags = StepLaw(pp=stages, backward=(2000 + again, 1000), again=again)
    room = replace(ROOM, available=available)
    kept = replace(flags, rooms=(room, room))
    assert kept.rank(works, groups, tokens) <= flags.rank(works, groups) == flags.rank(works, groups, tokens)
    assert kept.rank(works, groups) == flags.rank(works, groups), "without tokens nothing is kept"
    whole = replace(flags, rooms=(replace(room, available=10**9),) * 2)
    none = StepLaw(pp=stages).rank([whole.ideal(work) for work in works], groups)
    assert whole.rank(works, groups, tokens) == pytest.approx(none, abs=len(works) + stages)
    assert flags.ideal(works[0]) == works[0]


# --- corrections ---


def test_measurements_raise_the_estimate_at_once_and_lower_it_slowly():
    pytest.importorskip("torch")
    from wlb_megatron.plugin.step.recomputation import LEAST_SCALE, StepMemory, corrected

    def after(scale: int, planned: int, measured: int, **how: object) -> int:
        memory = StepMemory(available=100, planned_peak=planned, measured_peak=measured)
        return corrected(scale, memory, **how)

    assert after(1000, 50, 60) == 1200
    assert after(1200, 50, 40) == 1200 - (1200 - 960) // 8
    assert after(1000, 10, 20) == 1000, "a small step tells nothing"
    assert after(1000, 40, 80) == 2000, "but one that was taken to be small does"
    assert after(1000, 50, 50, retried=True) == 1100
    assert after(1000, 50, 60, retried=True) == 1200
    assert after(LEAST_SCALE, 90, 1) == LEAST_SCALE
    scale = 1500
    for _ in range(60):
        scale = after(scale, 80, 80 * 1000 // scale)
    assert 1000 <= scale <= 1010, "the estimate settles where planned and measured agree"
    steps = 0
    while scale > 750:  # experts that get equally many tokens, though half more were assumed
        scale, steps = after(scale, 80, 80 * 730 // scale, least_scale=600), steps + 1
    assert steps <= 30


@pytest.mark.parametrize(
    ("setting", "registered", "growing", "line"),
    [
        (None, False, True, "sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: mixed lengths"),
        (None, True, False, "leaves 1/7 of the memory to fragments: less if --use-nccl-ub is off"),
        ("expandable_segments:True", False, True, None),
        (
            "max_split_size_mb:512",
            *(False, False),
            "leaves 1/7 of the memory to fragments: less if PYTORCH_CUDA",
        ),
    ],
)
def test_the_allocator_grows_its_segments_or_a_part_is_left_to_fragments(
    setting, registered, growing, line, monkeypatch
):
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from wlb_megatron.plugin.step import recomputation

    settings = [setting or ""]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if setting is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    monkeypatch.setattr(
        torch.cuda.memory,
        "_snapshot",
        lambda: {"allocator_settings": {"expandable_segments": "True" in settings[-1]}},
    )
    grows, said = recomputation._grow_segments(registered)
    assert grows is growing and (said or "").startswith(line or "") and (said is None) == (line is None)

    gpu = GpuMemory(GIB, TINY, FULL, 64, 1, margin=0.0)
    state = recomputation.Recomputation(gpu=gpu, on_gpu=True, growing=grows)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70, 70))
    monkeypatch.setattr(recomputation, "_cap_of_torch", lambda total: total)
    for name in ("memory_allocated", "memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    assert recomputation._available(state, 0) == (0, 70 if growing else 60)


def test_each_forward_has_its_own_number_and_the_flags_are_back_after_the_step(monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from wlb_megatron.plugin.step import recomputation

    config = SimpleNamespace(recompute_method="uniform", recompute_num_layers=2)
    decoder = SimpleNamespace(config=config, num_layers_per_pipeline_rank=4)
    model = SimpleNamespace(module=SimpleNamespace(decoder=decoder))
    state = recomputation.Recomputation(gpu=GpuMemory(GIB, TINY, FULL, 64, 1, margin=0.1))
    monkeypatch.setattr(recomputation, "part", lambda _: state)
    monkeypatch.setattr(recomputation, "_measure", lambda *_, **__: None)

    def plan(*_: object) -> KeptLayers:
        state.memory = stage_memory(TINY, replace(FULL, recompute_layers=2), 0, [4])
        state.last = recomputation.StepMemory(recomputed=5, by_flags=12, layers=12)
        return KeptLayers(((4,), (1,), (0,)), 0, True)

    monkeypatch.setattr(recomputation, "_plan", plan)
    batches = [SimpleNamespace(loads=(Load(1, 1),), iteration=0)] * 3
    flags = ("uniform", 2)

    def set_in(step: int) -> tuple[str, int]:
        recomputation.prepare_forward(model, step)
        return config.recompute_method, config.recompute_num_layers

    assert set_in(1) == flags, "outside of a step"
    with recomputation.planned(batches, [model]):
        assert [set_in(step) for step in (1, 0, 2)] == [("block", 1), flags, ("block", 0)]
    assert (config.recompute_method, config.recompute_num_layers) == flags
    line = re.escape("raise --wlb-memory-margin (now 0.1), or set --wlb-recompute off (no memory)")
    with pytest.raises(RefusedHere, match=line), recomputation.planned(batches, [model]):
        set_in(1)
        raise torch.OutOfMemoryError("no memory")
    assert (config.recompute_method, config.recompute_num_layers) == flags
    assert set_in(2) == flags


# --- what both models know ---

SHAPE = "hidden ffn layers heads kv_heads head_dim vocab gated projections delta_nets experts"
LAYOUT = """tensor context pipeline data virtual distributed_optimizer keep_keys recompute recompute_layers
recompute_block"""
BOTH = {
    # of the memory model: of the time model
    **{name: f"shape.{name}" for name in SHAPE.split()},
    **{name: f"layout.{name}" for name in LAYOUT.split()},
}
MEMORY_ALONE = {
    "group": "an interleaved schedule takes stages of micro-batches at a time in both; more only holds more",
    "micro_batches": "each plan brings its own number",
    "sequence": "the time model assumes it with tensor parallelism",
    "fully_sharded": "hidden behind layers, as far as Assumptions.dp_exposed says",
    "losses_in_forward": "the same work at another time; pipelines exclude FSDP",
    "tied": "the same matrices are multiplied",
    "qk_norm": "a small part of a layer's time outside attention",
    "compressed": "its weights are among the projections",
    "fused": "a profile measures either",
    "dropout": "refused in attention, and a mask of a byte elsewhere",
    "dtype_bytes": "kernel tables and rates are of bf16",
    "losses": "further depths are predicted as none",
}
TIME_ALONE = {
    **dict.fromkeys(("assumptions", "measured", "costs"), "rates"),
    **dict.fromkeys(("shape", "layout"), "compared field by field"),
}


def test_every_flag_of_the_memory_model_is_one_of_the_time_model_or_has_a_reason_and_the_reverse():
    memory = {field.name for kind in (Layout, Model) for field in fields(kind)}
    memory -= {"reduce_overlaps", "gather_overlaps"}  # of the time model alone
    assert memory == set(BOTH) | set(MEMORY_ALONE) and not set(BOTH) & set(MEMORY_ALONE)
    time = {field.name for field in fields(LayerModel)} - set(TIME_ALONE)
    assert time == {name for name in BOTH.values() if "." not in name}


def test_every_flag_of_planned_recomputation_reaches_what_a_stage_holds():
    """Not the layout of stages, which decides who holds what: a stage's events and layers are given."""
    layout = Layout(recompute="full", tensor=2, context=2, pipeline=2, recompute_layers=2)
    plain: StageMemory = stage_memory(TINY, layout, 1, [4])
    changed = {
        **{"tensor": 1, "context": 1, "sequence": True, "losses_in_forward": True, "keep_keys": False},
        **{"recompute_layers": 1, "recompute_block": True, "pipeline": 3},
    }
    for name, value in changed.items():
        other = stage_memory(TINY, replace(layout, **{name: value}), 1, [4])
        assert other != plain, name
    others = """pipeline data virtual group micro_batches distributed_optimizer fully_sharded reduce_overlaps
    gather_overlaps recompute fused"""
    assert {field.name for field in fields(layout)} == set(changed) | set(others.split())
