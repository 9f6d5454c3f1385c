"""A rehearsal is of tokens that training can meet, and leaves no state behind."""

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_runs import write_corpus

from wlb_megatron.documents.blend import Blend
from wlb_megatron.pipeline.kept_layers import plan_kept_layers
from wlb_megatron.pipeline.orders import grouped_orders
from wlb_megatron.plugin.micro_batches.loaded import Layout
from wlb_megatron.plugin.micro_batches.planning import ShardSettings
from wlb_megatron.plugin.step.rehearsal import longest_micro_batches, rehearse, text, unchanged
from wlb_megatron.refusals import RefusedHere
from wlb_megatron.workload.kernel_table import h100
from wlb_megatron.workload.memory import stage_memory
from wlb_megatron.workload.model import Layout as StageLayout
from wlb_megatron.workload.model import Model


@pytest.fixture
def documents(tmp_path):
    """A corpus of four documents, one of them empty, and their tokens."""
    tokens = write_corpus(tmp_path / "corpus", [9, 0, 30, 5], vocabulary=100)
    return Blend([str(tmp_path / "corpus")]), [document.tolist() for document in tokens]


def test_the_tokens_are_of_whole_documents_and_begin_again_where_these_are_few(documents):
    corpus, tokens = documents
    drawn = text(corpus, 500, 0, None).tolist()
    assert len(drawn) == 500
    while drawn:
        (document,) = [each for each in tokens if each and drawn[: len(each)] == each[: len(drawn)]]
        del drawn[: len(document)]

    # Data-parallel ranks rehearse other tokens, and ids without a row are replaced.
    assert text(corpus, 64, 3, None).tolist() == text(corpus, 64, 3, None).tolist()
    assert text(corpus, 64, 3, None).tolist() != text(corpus, 64, 4, None).tolist()
    assert text(corpus, 64, 3, 50).max() == 49


def test_context_parallel_ranks_hold_parts_of_one_text_and_predict_its_next_tokens(documents):
    corpus, _ = documents
    settings = ShardSettings(0, 2, 2, "hybrid", h100())
    whole, following = np.full(24, -1), np.full(24, -1)
    for rank in range(2):
        (batch,) = longest_micro_batches(24, 16, settings, Layout(rank, 1, 8, True), corpus).batches
        index = batch.planned.shard.packed_index(rank)
        whole[index], following[index] = batch.held.tokens[0], batch.held.labels[0]
    stream = text(corpus, 25, 0, None)
    assert whole.tolist() == stream[:-1].tolist() and following.tolist() == stream[1:].tolist()
    assert len(set(whole.tolist())) > 4


def test_a_document_in_chunks_is_rehearsed_whole_with_every_micro_batch_full(documents):
    corpus, _ = documents
    settings = ShardSettings(0, 2, 2, "hybrid", h100())
    rehearsal = longest_micro_batches(24, 64, settings, Layout(1, 1, 8, True), corpus, chunked=(4, 60))
    planned = [batch.planned for batch in rehearsal.batches]
    chunks = [micro_batch.pieces[0] for micro_batch in planned]
    assert [(chunk.prefix, chunk.tokens) for chunk in chunks] == [(0, 24), (24, 24), (48, 12), (0, 24)]
    assert {(each.shard.tokens, each.steps, each.chunk_groups) for each in planned} == {(24, 4, (4,))}
    assert [micro_batch.shard.prefixes.max() for micro_batch in planned] == [0, 24, 48, 0]
    assert rehearsal.sizes.prefix == 60


@pytest.mark.parametrize("pattern", ["*-*-", "-*-*"])
def test_a_hybrid_models_rehearsal_keeps_every_layer_that_memory_has_room_for(documents, pattern):
    corpus, _ = documents
    settings = ShardSettings(0, 2, 2, "hybrid", h100(), keeps_layers=True)
    (batch,) = longest_micro_batches(24, 16, settings, Layout(0, 1, 8, True), corpus).batches
    model = Model(hidden=64, ffn=256, layers=pattern, heads=4, kv_heads=2)
    memory = stage_memory(model, StageLayout(context=2, recompute="full"), 0, [pattern])
    plan = plan_kept_layers(grouped_orders(1, (1,))[0], batch.planned.loads, memory, 1 << 40)
    assert plan.fits and plan.recomputed == ((0,),)


@dataclass
class RecipeState:
    """Transformer Engine's DelayedScalingRecipeState, as far as its buffers go."""

    scale: torch.Tensor
    amax_history: torch.Tensor

    @staticmethod
    def fresh(tensors: int = 3, length: int = 4) -> "RecipeState":
        return RecipeState(torch.ones(tensors), torch.zeros(length, tensors))

    def learn(self, value: float) -> None:
        """What reduce_and_update_fp8_tensors does at an autocast's end, in place."""
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0] = value
        self.scale.fill_(448 / value)

    def values(self) -> tuple[list[float], list[list[float]]]:
        return self.scale.tolist(), self.amax_history.tolist()


class Linear(torch.nn.Module):
    """A module of Transformer Engine's: scales in fp8_meta, where they are from its first forward pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}


class Chunk(torch.nn.ModuleDict):
    def zero_grad_buffer(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch):
    """Transformer Engine's global state; the plugin's backend is imported over stand-ins for its modules."""
    from megatron.core.models.gpt import gpt_model  # noqa: F401  (Megatron looks for Transformer Engine when imported)
    from megatron.training import global_vars

    state = SimpleNamespace(global_scale_buffer={}, global_amax_history_buffer={})
    attention = ModuleType("transformer_engine.pytorch.cpp_extensions.fused_attn")
    attention.__dict__.update(
        FusedAttnBackend={"F16_arbitrary_seqlen": 1}, fused_attn_fwd=None, fused_attn_bwd=None
    )
    quantization = ModuleType("transformer_engine.pytorch.quantization")
    quantization.__dict__["FP8GlobalStateManager"] = SimpleNamespace(quantization_state=state)
    for name in ("", ".pytorch", ".pytorch.cpp_extensions"):
        name = f"transformer_engine{name}"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (attention, quantization):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "wlb_megatron.attention.kernels.te_backend", raising=False)
    importlib.import_module("wlb_megatron.attention.kernels.te_backend")
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(fp8="hybrid"))
    monkeypatch.setattr("wlb_megatron.plugin.step.rehearsal.build_graphs", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)
    yield state
    sys.modules.pop("wlb_megatron.attention.kernels.te_backend", None)


def joins(engine: Any, state: RecipeState, direction: str) -> None:
    """add_fp8_tensors_to_global_buffer."""
    key = f"{direction}_recipe=delayed,group=None"
    engine.global_scale_buffer.setdefault(key, []).append(state.scale)
    engine.global_amax_history_buffer.setdefault(key, []).append(state.amax_history)


def test_fp8s_scales_and_histories_are_those_of_a_start_or_of_the_checkpoint(engine):
    """One module loaded, one loaded with a longer history than this run keeps, one that begins, one in no module."""
    loaded, shortened, begun = Linear(), Linear(), Linear()
    chunk = Chunk({"loaded": loaded, "shortened": shortened, "begun": begun})
    for module, length in ((loaded, 4), (shortened, 8)):
        for direction in ("scaling_fwd", "scaling_bwd"):
            module.fp8_meta[direction] = RecipeState.fresh(length=length)
            for value in range(1, length + 1):
                module.fp8_meta[direction].learn(float(value))
    before = loaded.fp8_meta["scaling_fwd"].values()
    kept_rows = shortened.fp8_meta["scaling_bwd"].amax_history[:4].tolist()
    hidden = RecipeState.fresh()

    def step() -> None:
        for module in (loaded, shortened, begun):
            for direction in ("forward", "backward"):
                name = "scaling_fwd" if direction == "forward" else "scaling_bwd"
                state = module.fp8_meta.setdefault(name, RecipeState.fresh())
                if module is shortened:
                    state.amax_history = state.amax_history[:4].clone()
                joins(engine, state, direction)
        joins(engine, hidden, "forward")
        for key, scales in engine.global_scale_buffer.items():
            for state in map(RecipeState, scales, engine.global_amax_history_buffer[key]):
                state.learn(1000.0)

    rehearse(step, [chunk], SimpleNamespace(sizes=()))
    assert loaded.fp8_meta["scaling_fwd"].values() == loaded.fp8_meta["scaling_bwd"].values() == before
    assert shortened.fp8_meta["scaling_bwd"].values() == ([56.0] * 3, kept_rows)
    fresh = RecipeState.fresh().values()
    assert begun.fp8_meta["scaling_fwd"].values() == begun.fp8_meta["scaling_bwd"].values() == fresh
    assert hidden.values() == fresh
    held = engine.global_scale_buffer["forward_recipe=delayed,group=None"]
    assert held[0] is loaded.fp8_meta["scaling_fwd"].scale  # it learns on in the same tensors


def test_a_model_without_fp8_needs_no_transformer_engine(monkeypatch, engine):
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", SimpleNamespace(fp8=None))
    monkeypatch.setitem(sys.modules, "wlb_megatron.attention.kernels.te_backend", None)
    with unchanged([Chunk({"linear": torch.nn.Linear(2, 2)})]):
        pass


def test_a_rehearsal_that_runs_out_of_memory_ends_with_a_line_that_names_sizes_and_cures(
    monkeypatch, engine, documents
):
    settings = ShardSettings(dp_rank=0, cp_size=2, alignment=4, sharding="adaptive", table=h100())
    layout = Layout(cp_rank=1, activation_divisor=1, hidden_size=8, reads_tokens=True)
    longest = longest_micro_batches(96, 64, settings, layout, documents[0])

    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore of it")

    with pytest.raises(RefusedHere) as refused:
        rehearse(step, [Chunk({"linear": torch.nn.Linear(2, 2)})], longest)
    (line,) = str(refused.value).splitlines()
    assert "micro-batches of 96 tokens, of which this rank holds 48, do not fit" in line
    assert "--wlb-max-tokens" in line and "Tried to allocate 2 GiB." in line
