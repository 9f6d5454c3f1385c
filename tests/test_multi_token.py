"""Multi-token prediction: a token's next ones are its own document's, on whatever rank they are held."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_runs import flags, rewrite_corpus, train, whole_gradients, write_corpus

from wlb_megatron.attention.core_attention import WlbPackedSeqParams
from wlb_megatron.documents.blend import Blend
from wlb_megatron.documents.predictions import predictions
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.summary import PlanSummary
from wlb_megatron.plan import Piece
from wlb_megatron.plugin import install
from wlb_megatron.plugin.logs import logged_losses
from wlb_megatron.plugin.plans.data import PackedDocuments
from wlb_megatron.plugin.plans.loaded import Layout
from wlb_megatron.plugin.plans.planning import PlannedMicroBatch
from wlb_megatron.plugin.step.multi_token import (
    next_in_document,
    refuse_other_form,
    wrap_is_inference_linear,
    wrap_roll_tensor,
    wrap_roll_tensors,
    wrap_track_metrics,
)
from wlb_megatron.refusals import Refused
from wlb_megatron.sharding.cut import pad
from wlb_megatron.sharding.following import following
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard

SHARDINGS = ["per-sequence", "per-document", "hybrid"]


def test_the_worked_example_of_two_ranks() -> None:
    plan = ShardPlan(
        np.array([4, 2]), (np.array([[0, 0, 1], [0, 3, 4], [1, 0, 1]]), np.array([[0, 1, 3], [1, 1, 2]]))
    )
    assert following(plan).tolist() == [3, 6, 5, 4, 1, 6]


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=10).filter(sum),
    cp=st.sampled_from([1, 2, 3, 4]),
    sharding=st.sampled_from(SHARDINGS),
)
def test_following_is_the_next_token_of_the_same_piece(lengths: list[int], cp: int, sharding: str) -> None:
    lengths = [*lengths, -sum(lengths) % cp]
    plan = shard(np.array(lengths), cp, sharding)
    held = [
        (piece, position)
        for rows in plan.ranks
        for piece, start, end in rows.tolist()
        for position in range(start, end)
    ]
    for at, after in zip(held, following(plan).tolist(), strict=True):
        piece, position = at
        if position + 1 < lengths[piece]:
            assert held[after] == (piece, position + 1)
        else:
            assert after == plan.tokens


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_one_rank_rolls_as_megatron_does_for_packed_sequences(dtype: torch.dtype) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    lengths = [5, 1, 9, 2]
    bounds = torch.tensor(np.concatenate(([0], np.cumsum(lengths))), dtype=torch.int32)
    values = torch.arange(1, 18).to(dtype)[None]
    expected = roll_tensor(values, packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds))
    after = torch.from_numpy(following(shard(np.array(lengths), 1, "per-document")).astype(np.int32))
    rolled = next_in_document(values, after, None)
    assert torch.equal(rolled[0], expected[0]) and rolled[1] == expected[1]


def test_a_linear_layer_is_none_of_inference_where_transformer_engine_is_missing() -> None:
    class Inference(torch.nn.Linear):
        pass

    kinds: list[object] = [Inference]
    asked = wrap_is_inference_linear(lambda module: isinstance(module, tuple(kinds)))  # type: ignore[arg-type]
    assert asked(Inference(1, 1)) and not asked(torch.nn.Linear(1, 1))
    kinds.append(SimpleNamespace())  # what Megatron makes of a class derived from a missing one
    assert not asked(torch.nn.Linear(1, 1))


def test_a_micro_batch_that_was_not_planned_for_it_is_an_error() -> None:
    for wrap, rolled in ((wrap_roll_tensor, torch.ones(1, 4)), (wrap_roll_tensors, [torch.ones(1, 4)])):
        roll = wrap(lambda *_: "Megatron's")
        assert roll(rolled) == "Megatron's"
        with pytest.raises(WlbError, match="not planned"):
            roll(rolled, packed_seq_params=WlbPackedSeqParams())


def test_a_micro_batch_brings_the_factors_of_its_whole_iteration(tmp_path: Path) -> None:
    """Of 128 predictions in the iteration 64 are left after a roll and none after two: factors 2 and 0. The ranks of
    the micro-batch hold 6 of its own predictions: a document of 7 tokens has 6, its first 4 tokens alone have 4."""
    rewrite_corpus(tmp_path / "documents", [np.arange(7, dtype=np.int32), np.arange(2, dtype=np.int32)])
    corpus = Blend([str(tmp_path / "documents")])
    summary = PlanSummary(0, 0, 0, 0, 1.0, 1.0, 1.0, 1, 0, 0.0, 0, 0)
    for pieces, predicted in (
        ([Piece(0, 0, 0, 7), Piece(0, 1, 0, 2)], 7),
        ([Piece(0, 0, 0, 4), Piece(0, 1, 0, 2)], 5),
        ([Piece(0, 0, 4, 7)], 2),
    ):
        padded = pad(tuple(pieces), 4)
        plan = shard(np.array([piece.tokens for piece in padded]), 2, "per-document")
        planned = PlannedMicroBatch(0, 0, padded, plan, summary, 0.0, predictions=(128, 64, 0))
        ranks = [PackedDocuments(corpus, Layout(rank, 1, 8, True, follows=2))[planned] for rank in range(2)]
        assert sum(batch.held.predicted for batch in ranks) == predicted
        assert [batch.held.predicted for batch in ranks] == [float(b.held.loss_mask.sum()) for b in ranks]
        assert all(batch.factors == (2.0, 0.0) for batch in ranks)
        assert all(batch.following.tolist() == following(plan).tolist() for batch in ranks)


def one_at_a_time(tensor: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The dev branch's form, where Megatron itself sums the mask."""
    (rolled,) = wrap_roll_tensors(lambda *_: None)([tensor], **more)
    return rolled, rolled.sum()


@pytest.mark.parametrize("roll", [wrap_roll_tensor(lambda *_: None), one_at_a_time], ids=["release", "dev"])
def test_the_sum_told_leaves_each_depth_its_factor_alone(roll: Any) -> None:
    """Megatron multiplies by (predictions without a roll / the sum it gets, at least 1)."""
    after = torch.tensor([1, 2, 4, 4], dtype=torch.int32)
    for mask in ([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]):
        params = WlbPackedSeqParams(following=after, factors=iter([1.25, 4.0]), predicted=sum(mask))
        rolled = torch.tensor([mask])
        for factor in (1.25, 4.0):
            expected = [factor * float(rolled[0, at] != 0) if at < 4 else 0.0 for at in after.tolist()]
            rolled, total = roll(rolled, packed_seq_params=params, cp_group=None)
            weighed = rolled * sum(mask) / total.clamp(min=1)
            assert weighed.tolist() == [expected] and type(weighed) is torch.Tensor
    padding = torch.tensor([[False, False, False, True]])
    assert roll(padding, packed_seq_params=params)[0] is padding


def test_a_log_of_sums_over_predictions_is_not_corrected_for_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    def track(loss_scale: float) -> float:
        return loss_scale

    monkeypatch.setattr(logged_losses, "part", lambda kind: SimpleNamespace(factor=0.25))
    monkeypatch.delattr(MTPLossLoggingHelper, "save_loss_to_tracker", raising=False)
    assert wrap_track_metrics(track)(1.0) == 0.25

    def of_means(loss: Any, layer_number: int, num_layers: int) -> None:
        """Of releases before 0.19."""

    def of_sums(loss_sum: Any, num_tokens: Any, layer_number: int, num_layers: int) -> None:
        """Of the dev branch."""

    for save, scale in ((of_means, 0.25), (of_sums, 1.0)):
        monkeypatch.setattr(MTPLossLoggingHelper, "save_loss_to_tracker", save, raising=False)
        assert wrap_track_metrics(track)(1.0) == scale


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9)).map(
            lambda drawn: (sum(drawn), drawn[0], drawn[0] + drawn[1])
        ),
        max_size=8,
    ),
    further=st.integers(0, 3),
)
def test_predictions_are_those_counted_token_by_token(
    pieces: list[tuple[int, int, int]], further: int
) -> None:
    expected = []
    for depth in range(further + 1):
        places = [(n, at, end) for n, start, end in pieces for at in range(start, end)]
        expected.append(sum(at + 1 < n and at + depth < end and at + depth + 1 < n for n, at, end in places))
    made = [Piece(0, number, start, end) for number, (_, start, end) in enumerate(pieces)]
    lengths = np.array([length for length, _, _ in pieces], dtype=np.int64)
    assert predictions(made, lengths, further) == tuple(expected)


@pytest.mark.megatron
def test_documents_in_one_micro_batch_or_in_two_have_the_same_gradient(tmp_path: Path) -> None:
    """22 documents of 3 tokens and one of 62: packed apart, their own factors would be 2.0 and 1.02 at depth 1."""
    write_corpus(tmp_path / "documents", [3] * 22 + [62])
    further = ["--mtp-num-layers", "2", "--train-iters", "1", "--data-path", str(tmp_path / "documents")]
    further += ["--wlb-max-delay", "0", "--split", "1,0,0"]
    batches = {1: ["--seq-length", "128"], 2: []}
    runs = {
        number: train(
            [*flags(), *further, *more, "--global-batch-size", str(number)], 1, tmp_path / str(number)
        )
        for number, more in batches.items()
    }
    documents = [[entry[2] for entry in run[0]["documents"]] for run in runs.values()]
    assert [len(of_micro_batch) for of_micro_batch in documents] == [1, 2]
    assert sorted(documents[0][0]) == sorted([*documents[1][0], *documents[1][1]])
    assert max(piece[3] - piece[2] for piece in documents[0][0]) == 62
    joined, apart = (whole_gradients(run) for run in runs.values())
    for name, gradient in joined.items():
        assert torch.linalg.norm(apart[name] - gradient) <= 1e-5 * torch.linalg.norm(gradient), name


def test_a_model_of_several_depths_on_an_earlier_stage_is_refused() -> None:
    from wlb_megatron.config import WlbConfig
    from wlb_megatron.refusals import Refused, refuse_unsupported

    args = SimpleNamespace(micro_batch_size=1, mtp_num_layers=1, pipeline_model_parallel_layout="Et|tmL")
    refuse_unsupported(args, WlbConfig())
    args.pipeline_model_parallel_layout = "Et|tm|L"
    with pytest.raises(Refused, match="the last stage"):
        refuse_unsupported(args, WlbConfig())


def test_multi_token_prediction_is_refused_where_its_roll_has_another_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.transformer import multi_token_prediction

    def roll_tensor(tensors: list[torch.Tensor], shifts: int = -1) -> list[torch.Tensor]:
        return tensors

    monkeypatch.setattr(multi_token_prediction, "roll_tensor", roll_tensor)
    assert not any(hook.place.endswith(":roll_tensor") for hook in install.rows())
    refuse_other_form(0)
    with pytest.raises(Refused, match="error: --mtp-num-layers"):
        refuse_other_form(1)
