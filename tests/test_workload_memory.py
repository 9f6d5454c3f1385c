"""Lmax fitted to memory: against hand-computed bytes, Megatron's own formula, and in the right direction."""

import ast
import dataclasses
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_megatron.errors import WlbError
from wlb_megatron.packing.limits import GpuMemory
from wlb_megatron.workload.memory import (
    GIB,
    attended_bytes,
    chunked_bytes,
    chunks_in_flight,
    kept_bytes,
    keys_bytes,
    logits_bytes,
    memory_needed,
    token_bytes,
    waiting_loss_bytes,
    weight_bytes,
)
from wlb_megatron.workload.model import Experts, Layout, Model

SMALL = Model(hidden=8, ffn=16, layers=2, heads=2, kv_heads=1, head_dim=4, vocab=32)
SEVEN_B = Model(
    hidden=4096, ffn=11008, layers=32, heads=32, kv_heads=32, head_dim=128, vocab=32000, gated=True
)
GPT_7B = dataclasses.replace(SEVEN_B, ffn=16384, vocab=50304, gated=False, dropout=True)
H100 = 80 * GIB


def fit_max_tokens(
    shape: Model, layout: Layout, memory: int, *, window: int, alignment: int, margin: float = 0.1
) -> int:
    return GpuMemory(memory, shape, layout, window, alignment, margin).whole()


def weights_problem(shape: Model, layout: Layout, memory: int) -> str:
    return GpuMemory(memory, shape, layout, 64, 1, margin=0).weights_problem() or ""


def fit(shape: Model, layout: Layout, memory: int = H100, window: int = 8192) -> int:
    """Lmax, or 0 where it is refused."""
    try:
        return fit_max_tokens(shape, layout, memory, window=window, alignment=64)
    except WlbError:
        return 0


# --- by hand ---


def test_bytes_of_a_small_model_are_the_hand_computed_ones():
    # A layer keeps for a token: 4 x 8 x 2 = 64 of norms and matrices' inputs; q and output 2 x 2 x 4 x 2 = 32, their
    # log-sum-exps 2 x 4 = 8, k and v 2 x 4 x 2 = 16; FFN 3 x 16 x 2 = 96. Together 216; ids 28.
    alone = Layout()
    assert kept_bytes(SMALL, alone, 0) == 2 * 216 + 28
    # Final norm 2 x 8 x 2, logits in bf16 and fp32 32 x 6.
    assert logits_bytes(SMALL, alone) == 32 + 192
    # A layer's backward (216, and 2 x 8 x 2 gathered) is more than the logits.
    assert token_bytes(SMALL, alone, 0) == 460 + 216 + 32
    # Attention 2 x 8 x 4 x 3, FFN 3 x 8 x 16, in 2 layers; 2 embeddings of 32 x 8; 5 norms of 8.
    assert weight_bytes(SMALL, alone, 0) == (2 * (192 + 384) + 512 + 40) * 18
    assert memory_needed(SMALL, alone, 100) == 1704 * 18 + 100 * 708


def test_a_split_model_keeps_each_ranks_share():
    # TP 2, CP 2: a layer keeps 64 / 2, one head of 16 + 4, its k and v 16, FFN 48, and keys of both ranks 2 x 16.
    layout = Layout(tensor=2, context=2, pipeline=2, sequence=True, micro_batches=8)
    layer, keys = 32 + 20 + 16 + 48, 32
    assert kept_bytes(SMALL, layout, 0) == 2 * (2 * (layer + keys) + 28)
    assert kept_bytes(SMALL, layout, 1) == 2 * (layer + keys) + 28
    assert weight_bytes(SMALL, layout, 0) == ((2 * 576 + 256) // 2 + 32) * 18
    assert weight_bytes(SMALL, layout, 1) == ((2 * 576 + 256) // 2 + 40) * 18


def test_the_distributed_optimizer_spreads_twelve_bytes_a_parameter_and_fsdp_all_eighteen():
    spread = Layout(data=2, context=2, distributed_optimizer=True)
    assert weight_bytes(SMALL, spread, 0) == 1704 * (6 + 3)
    assert weight_bytes(dataclasses.replace(SMALL, dtype_bytes=4), spread, 0) == 1704 * (8 + 2)
    spread = Layout(data=2, context=2, fully_sharded=True)
    assert weight_bytes(SMALL, spread, 0) == 1704 * 18 // 4 + 2 * 1704 // 2 * 2
    cut, same = (dataclasses.replace(SMALL, layers=pattern) for pattern in ("*-|*-", "*-*-"))
    assert weight_bytes(cut, spread, 0) == weight_bytes(same, spread, 0)
    # Tied embeddings are held once on one stage, and on both ends of a pipeline.
    tied = dataclasses.replace(SMALL, tied=True)
    assert weight_bytes(SMALL, Layout(), 0) - weight_bytes(tied, Layout(), 0) == 256 * 18
    two = Layout(pipeline=2)
    assert [weight_bytes(tied, two, s) for s in (0, 1)] == [weight_bytes(SMALL, two, s) for s in (0, 1)]


def test_experts_replace_the_ffn_and_are_spread_over_ranks_of_their_own():
    experts = Experts(count=8, ffn=4, parallel=2, tensor=2)
    layout = Layout(tensor=2, data=4, distributed_optimizer=True)
    # A rank has half of attention and embeddings, whole norms and routers of 8 x 8, and half of 4 experts of 3 x 8 x 4.
    dense = (2 * 192 + 512) // 2 + 40 + 2 * 8 * 8
    routed = 2 * 4 * (3 * 8 * 4 // 2)
    # 4 x 2 ranks a stage: 4 hold the same dense part, 2 the same experts.
    shape = dataclasses.replace(SMALL, experts=experts)
    assert weight_bytes(shape, layout, 0) == dense * (6 + 3) + routed * (6 + 6)
    # Unfused gradients in two bytes of one layer's first matrices, half of 4 of 8 x 2 x 4.
    unfused = dataclasses.replace(layout, fused=False)
    assert weight_bytes(shape, unfused, 0) - weight_bytes(shape, layout, 0) == 4 * 32 * 2
    for other in (SMALL, dataclasses.replace(shape, layers="*-")):
        assert weight_bytes(other, unfused, 0) == weight_bytes(other, layout, 0)


def test_weights_that_do_not_fit_alone_are_told_with_the_figure_and_a_cure_that_can_help():
    alone, spread = Layout(data=8), Layout(data=8, distributed_optimizer=True)
    needed = weight_bytes(SEVEN_B, alone, 0)
    assert not weights_problem(SEVEN_B, alone, needed)
    problem = weights_problem(SEVEN_B, alone, needed - 1)
    assert f"alone need {needed / GIB:.1f} GiB a GPU" in problem
    assert "use --use-distributed-optimizer" in problem
    problem = weights_problem(SEVEN_B, spread, weight_bytes(SEVEN_B, spread, 0) - 1)
    assert "use --use-distributed" not in problem and "add data-parallel ranks" in problem
    # Weights and gradients, 6 bytes a parameter of these 18, stay on every rank.
    problem = weights_problem(SEVEN_B, spread, needed // 3 - GIB)
    assert "raise --tensor-model" in problem and "add data-parallel ranks" not in problem
    with pytest.raises(WlbError, match="weights, gradients and optimizer state alone need"):
        fit_max_tokens(SEVEN_B, spread, needed // 4, window=64, alignment=8)


def test_micro_batches_in_flight_are_those_of_megatrons_schedules():
    plain = Layout(pipeline=4, micro_batches=8)
    assert [chunks_in_flight(plain, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert chunks_in_flight(dataclasses.replace(plain, micro_batches=2), 0) == 2
    interleaved = dataclasses.replace(plain, virtual=2)
    assert [chunks_in_flight(interleaved, stage) for stage in range(4)] == [11, 9, 7, 5]


# --- documents in chunks ---


def test_bytes_of_a_document_in_chunks_are_the_hand_computed_ones():
    # Keys and values of a token 2 x 4 in 2 layers, in 2 bytes and their gradients in 4.
    assert keys_bytes(SMALL, Layout()) == 2 * 8 * 6
    # At work: own keys beside kept ones, all of the document's and their gradients, 8 x 2 each.
    assert attended_bytes(SMALL, Layout()) == 3 * 16
    # Held: what layers keep, the final norm's input and output.
    weights, held = 1704 * 18, 150 * (460 + 32) + 50 * (216 + 32)
    each = 96 + 48
    assert chunked_bytes(SMALL, Layout(), longest=50, held=150, document=100) == (weights + held + 100 * each)
    # Only the last stage has the norm. Losses in the forward keep a softmax of 32 words in fp32. Three losses have
    # three norms, whose outputs are kept once more together.
    two = Layout(pipeline=2, micro_batches=2)
    early = dataclasses.replace(two, losses_in_forward=True)
    assert [waiting_loss_bytes(SMALL, two, stage) for stage in (0, 1)] == [0, 32]
    assert [waiting_loss_bytes(SMALL, early, stage) for stage in (0, 1)] == [0, 32 + 4 * 32]
    assert waiting_loss_bytes(dataclasses.replace(SMALL, losses=3), early, 1) == 3 * (48 + 4 * 32)


@pytest.mark.parametrize("context", [1, 2])
def test_the_longest_document_or_micro_batch_with_chunks_is_what_just_fits(context):
    layout = Layout(context=context, pipeline=2, micro_batches=4)
    room = chunked_bytes(SMALL, layout, longest=48, held=64 + 100, document=100)

    def fits(memory: int, window: int = 16) -> int:
        return GpuMemory(memory, SMALL, layout, window, 1, margin=0).longest_document(48)

    assert fits(room) == 100
    assert fits(room - 1) == 100 - context
    assert fits(1000) == 0
    assert fits(room, window=8) > 100


@pytest.mark.parametrize("context", [1, 2])
def test_the_longest_micro_batch_with_chunks_is_what_just_fits(context):
    layout = Layout(context=context, pipeline=2, micro_batches=4)
    # Of windows of 64, a stage holds two and a tenth more: 140.
    room = chunked_bytes(SMALL, layout, longest=48, held=140, document=64)

    def fits(memory: int) -> int:
        return GpuMemory(memory, SMALL, layout, 64, context, margin=0).in_chunks()

    assert fits(room) == 48
    assert fits(room - 1) == 48 - context
    assert fits(1000) == 0


# --- the fit ---


def test_lmax_is_what_just_fits_down_to_the_alignment_and_at_most_four_windows():
    room = memory_needed(SMALL, Layout(), 100)
    assert fit_max_tokens(SMALL, Layout(), room, margin=0, window=64, alignment=1) == 100
    assert fit_max_tokens(SMALL, Layout(), room - 1, margin=0, window=64, alignment=1) == 99
    assert fit_max_tokens(SMALL, Layout(), room, margin=0, window=64, alignment=8) == 96
    assert fit_max_tokens(SMALL, Layout(), H100, window=64, alignment=8) == 256


def test_lmax_below_a_window_and_a_quarter_is_refused_with_what_it_would_need():
    room = memory_needed(SMALL, Layout(), 80)
    assert fit_max_tokens(SMALL, Layout(), room, margin=0, window=64, alignment=8) == 80
    needed = r"1\.25 windows \(80 tokens\) needs .* GiB a GPU.*--recompute"
    with pytest.raises(WlbError, match=needed) as error:
        fit_max_tokens(SMALL, Layout(), room - 1, margin=0, window=64, alignment=8)
    assert "\n" not in str(error.value)
    with pytest.raises(WlbError, match=r"163840 tokens\) needs \d+\.\d GiB.*but 72\.0 GiB.*margin of 10%"):
        fit_max_tokens(SEVEN_B, Layout(tensor=2), H100, window=131072, alignment=1)


LAYOUTS = {
    **{"tensor": [1, 2, 4, 8], "context": [1, 2, 3, 8], "pipeline": [1, 2, 4], "data": [1, 8]},
    **{"virtual": [1, 2], "micro_batches": range(1, 17), "recompute": ["none", "selective", "full"]},
    **{"recompute_layers": range(1, 5)},
    **dict.fromkeys(("sequence", "distributed_optimizer", "recompute_block", "keep_keys"), (False, True)),
}
MODELS = {
    **{"hidden": [64, 1024, 4096], "ffn": [64, 3000, 16384], "layers": range(2, 41), "heads": [8, 32]},
    **{"kv_heads": [1, 8], "head_dim": [64, 128], "vocab": [1000, 128000], "dtype_bytes": [2, 4]},
    **dict.fromkeys(("gated", "tied", "dropout"), (False, True)),
}
layouts, shapes = (
    st.builds(kind, **{name: st.sampled_from(values) for name, values in choices.items()})
    for kind, choices in ((Layout, LAYOUTS), (Model, MODELS))
)
many = settings(deadline=None, max_examples=300)


@many
@given(shapes, layouts, st.integers(1, 200), st.integers(1, 64))
def test_what_is_fitted_is_the_most_that_fits(shape, layout, gib, alignment):
    memory, window = gib * GIB, 4096
    room = int(memory * 0.9)
    try:
        tokens = fit_max_tokens(shape, layout, memory, window=window, alignment=alignment)
    except WlbError:
        least = next(t for t in range(5 * window // 4, 2 * window) if t % alignment == 0)
        assert memory_needed(shape, layout, least) > room
        return
    assert tokens % alignment == 0
    assert 1.25 * window <= tokens <= 4 * window
    assert memory_needed(shape, layout, tokens) <= room
    more = tokens + alignment
    assert more > 4 * window or memory_needed(shape, layout, more) > room


@many
@given(shapes, layouts, st.integers(1, 200), st.integers(1, 200))
def test_more_memory_never_shortens_lmax(shape, layout, gib, other):
    small, large = sorted((gib, other))
    assert fit(shape, layout, small * GIB) <= fit(shape, layout, large * GIB)


@many
@given(shapes, layouts, st.integers(1, 200))
def test_more_ranks_never_shorten_lmax(shape, layout, gib):
    memory = gib * GIB
    wider = dataclasses.replace(layout, tensor=2 * layout.tensor)
    assert fit(shape, layout, memory) <= fit(shape, wider, memory)
    # From one context-parallel rank to two the gathered keys come in: from two ranks on it only gets easier.
    longer = dataclasses.replace(layout, context=2 * layout.context)
    if layout.context > 1:
        assert fit(shape, layout, memory) <= fit(shape, longer, memory)


@many
@given(shapes, layouts, st.integers(1, 200))
def test_more_recompute_never_shortens_lmax(shape, layout, gib):
    layout = dataclasses.replace(layout, recompute_layers=1, recompute_block=False, virtual=1)
    none, selective, full = (
        fit(shape, dataclasses.replace(layout, recompute=kind), gib * GIB)
        for kind in ("none", "selective", "full")
    )
    assert none <= selective <= full


def test_the_directions_show_in_a_case_that_memory_decides():
    base = Layout(
        tensor=4, context=2, pipeline=2, micro_batches=8, sequence=True, distributed_optimizer=True, data=4
    )
    shape = dataclasses.replace(SEVEN_B, layers=16)

    def lmax(**change: Any) -> int:
        return fit(shape, dataclasses.replace(base, **change), window=32768)

    assert 1.25 * 32768 < lmax() < 4 * 32768
    assert lmax() < lmax(tensor=8)
    assert lmax() < lmax(context=4)
    assert lmax() < lmax(recompute="selective") < lmax(recompute="full")
    assert lmax() < lmax(keep_keys=False)
    assert lmax(sequence=False) < lmax()
    assert lmax(virtual=2) < lmax() < lmax(micro_batches=1)


# --- Megatron's formula ---


def megatron_activation_bytes(args: Any, micro_batches: int) -> float:
    """Megatron's own function, cut from its file: its package wants a GPU when imported."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parents[1] / "training" / "theoretical_memory_usage.py"
    if not path.exists():
        pytest.skip("this megatron-core has no megatron/training/theoretical_memory_usage.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = "compute_activation_memory"
    tree.body = [node for node in tree.body if getattr(node, "name", "") == name]
    assert tree.body
    namespace: dict[str, Any] = {"math": math, "NUM_BYTES_IN_MEGABYTE": 1 << 20}
    exec(compile(tree, str(path), "exec"), namespace)
    return float(namespace[name](args, micro_batches))


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize(
    ("pipeline", "virtual", "micro_batches"), [(1, 1, 4), (4, 1, 8), (4, 1, 2), (4, 2, 8)]
)
def test_kept_activations_of_a_7b_gpt_agree_with_megatrons_formula_within_three_percent(
    tensor, pipeline, virtual, micro_batches
):
    # Where the formulas overlap: plain heads and FFN, sequence parallelism, no context parallelism, no attention
    # scores kept. Megatron's is of the first stage and, without a pipeline, of the logits in fp32.
    shape = dataclasses.replace(GPT_7B, layers=32 // pipeline)
    split = {"tensor": tensor, "pipeline": pipeline, "virtual": virtual, "micro_batches": micro_batches}
    layout, tokens = Layout(**split, sequence=True, recompute="selective"), 8192
    args = SimpleNamespace(
        **{"seq_length": tokens, "micro_batch_size": 1, "hidden_size": 4096, "ffn_hidden_size": 16384},
        **{"num_layers": 32, "padded_vocab_size": 50304, "tensor_model_parallel_size": tensor},
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
    )
    ours = kept_bytes(shape, layout, 0) + (logits_bytes(shape, layout) if pipeline == 1 else 0)
    assert ours * tokens == pytest.approx(megatron_activation_bytes(args, micro_batches), rel=0.03)


# --- bad input ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(SMALL, hidden=0), "hidden must be at least 1"),
        (lambda: Layout(tensor=0), "tensor must be at least 1"),
        (lambda: Layout(recompute="some"), "unknown recompute 'some'; choose none, selective, full"),
    ],
)
def test_settings_that_cannot_be_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
