"""A script's own loss function through Megatron's loop: as a GPT in plain torch and fp64, one document at a time."""

import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_combinations import CHUNKS, FOUR, TP, VPP, WHOLE
from megatron_runs import (
    LENGTHS,
    flags,
    output_of,
    read_ranks,
    refusal_of,
    train,
    whole_gradients,
    write_corpus,
)
from torch import Tensor
from torch.nn import functional

pytestmark = pytest.mark.megatron

HEADS, GROUPS = 4, 2
ROWS = {
    "whole documents": (1, WHOLE),
    "whole documents, a rehearsal": (1, f"{WHOLE} --wlb-rehearsal always"),
    "chunks": (1, CHUNKS),
    "chunks, tokens weigh equally": (1, f"{CHUNKS} --wlb-token-weights equal"),
    "chunks, PP2xCP2": (4, f"{CHUNKS} --pipeline-model-parallel-size 2 --context-parallel-size 2"),
    "whole documents, VPP2 on PP2": (2, f"{WHOLE} {VPP} {FOUR}"),
    "DP2xTP2": (4, f"{WHOLE} {TP} 2"),
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("corpus") / "documents"
    return prefix, [torch.from_numpy(ids).long() for ids in write_corpus(prefix, LENGTHS)]


def arguments(prefix: Path, more: str) -> list[str]:
    return flags(
        f"--data-path {prefix} --global-batch-size 8 --train-iters 1 --wlb-replace-script-functions", more
    )


@pytest.mark.parametrize("name", ROWS)
def test_values_counts_and_gradients_are_those_of_the_documents_one_at_a_time(name, documents, tmp_path):
    processes, more = ROWS[name]
    ranks = train(arguments(documents[0], more), processes, tmp_path, WORKER_OWN_LOSS="1")
    gradients = whole_gradients(ranks)
    loss, count, _, expected = oracle(gradients, trained(ranks, documents[1]))
    scoring = [rank for rank in ranks if rank["place"]["tp"] == 0]
    assert sum(entry[1] for rank in scoring for entry in rank["losses"]) == count
    assert sum(entry[0] for rank in scoring for entry in rank["losses"]) == pytest.approx(loss, rel=1e-5)
    divisor = 8 * 64 if "equally" in name else count
    for parameter, gradient in expected.items():
        error = torch.linalg.norm(gradients[parameter].double() * divisor - gradient)
        assert error <= 2e-5 * torch.linalg.norm(gradient), parameter


def test_fp16_is_refused_which_divides_by_the_tokens_of_the_plan(documents, tmp_path):
    refused = refusal_of(arguments(documents[0], f"{WHOLE} --fp16"), 1, out=tmp_path, WORKER_OWN_LOSS="1")
    assert "wlb_megatron refuses --fp16 with the script's own loss function own_loss (" in refused


@pytest.mark.parametrize("more", [WHOLE, CHUNKS])
def test_what_it_logs_and_evaluation_are_its_own(more, documents, tmp_path):
    more += " --eval-iters 1 --eval-interval 1 --split 60,40,0"
    said = output_of(arguments(documents[0], more), 1, out=tmp_path, WORKER_OWN_LOSS="1")
    assert "> wlb_megatron replaces the script's own forward step own_forward_step (" in said
    assert "> wlb_megatron calls the script's own loss function own_loss (" in said
    (rank,) = read_ranks(tmp_path, 1)
    loss, count, squares, _ = oracle(whole_gradients([rank]), trained([rank], documents[1]))
    (logged,) = re.findall(r"lm loss: (\S+) .*squares: (\S+)", said)
    assert [float(value) for value in logged] == pytest.approx([loss / count, squares / count], rel=1e-5)
    evaluated = [entry for entry in rank["own"] if not entry[0]]
    expected = sum(entry[1] for entry in evaluated) / sum(entry[2] for entry in evaluated)
    value, *_ = re.findall(r"validation loss at iteration 1 .*?lm loss value: (\S+)", said)
    assert float(value) == pytest.approx(expected, rel=1e-5)


def trained(ranks: list[dict[str, Any]], documents: list[Tensor]) -> list[Tensor]:
    """The documents of the first iteration, whatever their pieces."""
    drawn = set()
    for rank in ranks:
        pieces = [piece for iteration, _, of, _ in rank["documents"] if iteration == 0 for piece in of]
        drawn |= {(rank["place"]["dp"], *piece[:2]) for piece in pieces if piece[1] >= 0}
    return [documents[document] for _, _, document in sorted(drawn)]


def oracle(like: dict[str, Tensor], documents: list[Tensor]) -> tuple[float, int, float, dict[str, Tensor]]:
    """The sum of megatron_worker.own_loss, its tokens, their squared losses, and the gradients of the sum."""
    weights = {name: known(name, value.shape).double().requires_grad_() for name, value in like.items()}
    total, squares = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    count = 0
    for ids in documents:
        if len(ids) > 1:
            losses = functional.cross_entropy(scores(weights, ids)[:-1], ids[1:], reduction="none")
            kept = losses[losses < 5.0]
            total = total + (0.9 * kept + 0.1 + 0.02 * kept.square()).sum()
            squares, count = squares + kept.square().sum().detach(), count + len(kept)
    gradients = torch.autograd.grad(total, list(weights.values()))
    return float(total.detach()), count, float(squares), dict(zip(weights, gradients, strict=True))


def known(name: str, shape: torch.Size) -> Tensor:
    """A weight of megatron_worker.with_known_weights."""
    full = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    full *= 0.2 if shape[-1] <= 64 else 1.6 / shape[-1] ** 0.5
    return 1 + 0.1 * full if "norm" in name else full


def scores(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """[n, words] of one document of n tokens."""
    hidden = weights["embedding.word_embeddings.weight"][ids]
    layers = {int(number) for name in weights for number in re.findall(r"layers\.(\d+)\.", name)}
    for number in sorted(layers):
        layer = {name.removeprefix(f"decoder.layers.{number}."): weight for name, weight in weights.items()}
        hidden = hidden + attention(layer, norm(hidden, layer["input_layernorm.weight"]))
        inner = norm(hidden, layer["pre_mlp_layernorm.weight"])
        gate, up = (inner @ layer["mlp.linear_fc1.weight"].T).chunk(2, -1)
        hidden = hidden + (functional.silu(gate) * up) @ layer["mlp.linear_fc2.weight"].T
    return norm(hidden, weights["decoder.final_layernorm.weight"]) @ weights["output_layer.weight"].T


def attention(layer: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Each group's queries lie beside its key and value."""
    packed = (hidden @ layer["self_attention.linear_qkv.weight"].T).view(
        len(hidden), GROUPS, HEADS // GROUPS + 2, -1
    )
    query, key, value = packed[:, :, :-2].flatten(1, 2), packed[:, :, -2], packed[:, :, -1]
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    key, value = (part.repeat_interleave(HEADS // GROUPS, 0) for part in (key, value))
    out = functional.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
    return out.transpose(0, 1).flatten(1) @ layer["self_attention.linear_proj.weight"].T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x: Tensor) -> Tensor:
    """[heads, n, channels] at positions 0 .. n - 1."""
    channels = x.shape[-1]
    speeds = 10000.0 ** (-torch.arange(0, channels, 2, dtype=x.dtype) / channels)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * speeds
    angles = torch.cat([angles, angles], -1)
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()
