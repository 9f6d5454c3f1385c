"""Multi-token prediction: a token's next ones are its own document's, on whatever rank they are held."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_runs import flags, rewrite_corpus, train, whole_gradients, write_corpus

from wlb_megatron.attention.core_attention import WlbPackedSeqParams
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blend import Blend, predictions
from wlb_megatron.errors import WlbError
from wlb_megatron.plan import Piece, PlanSummary
from wlb_megatron.plugin import hooks
from wlb_megatron.plugin.logs import logged_losses
from wlb_megatron.plugin.micro_batches.loaded import HeldTokens, Layout, PackedDocuments
from wlb_megatron.plugin.micro_batches.planning import PlannedMicroBatch
from wlb_megatron.plugin.step.multi_token import (
    refuse_other_form,
    wrap_is_inference_linear,
    wrap_roll_tensor,
    wrap_track_metrics,
)
from wlb_megatron.refusals import Refused, refuse_unsupported
from wlb_megatron.sharding.cut import pad, shard

SUMMARY = PlanSummary(0, 0, 0, 0, 1.0, 1.0, 1.0, 1, 0, 0.0, 0, 0)


def held_of(
    corpus: Blend, pieces: list[Piece], cp: int, depths: int, predictions: tuple[int, ...]
) -> list[HeldTokens]:
    """What each rank holds of one micro-batch."""
    padded = pad(tuple(pieces), 2 * cp)
    plan = shard(np.array([piece.tokens for piece in padded]), cp, "per-document")
    planned = PlannedMicroBatch(0, 0, padded, plan, SUMMARY, 0.0, predictions=predictions)
    layouts = [Layout(rank, 1, 8, True, follows=depths) for rank in range(cp)]
    return [held for layout in layouts if (held := PackedDocuments(corpus, layout)[planned].held) is not None]


def test_rows_are_what_megatron_rolls_for_packed_sequences(tmp_path):
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    lengths, number = [5, 1, 9, 3], np.random.default_rng(1)
    rewrite_corpus(tmp_path / "documents", [number.integers(1, 99, size, np.int32) for size in lengths])
    pieces = [Piece(0, document, 0, size) for document, size in enumerate(lengths)]
    (held,) = held_of(Blend([str(tmp_path / "documents")]), pieces, 1, 2, (1, 1, 1))
    bounds = torch.tensor(np.concatenate(([0], np.cumsum(lengths))), dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds)
    roll = getattr(roll_tensor, "__wlb_original__", roll_tensor)
    for rows in (held.tokens, held.labels, held.loss_mask, held.position_ids):
        expected = rows[:1]
        for depth in (1, 2):
            expected = roll(expected, packed_seq_params=params)[0]
            assert torch.equal(rows[depth : depth + 1], expected)


def test_a_linear_layer_is_none_of_inference_where_transformer_engine_is_missing():
    class Inference(torch.nn.Linear):
        pass

    kinds: list[object] = [Inference]
    asked = partial(wrap_is_inference_linear, lambda module: isinstance(module, tuple(kinds)))
    assert asked(Inference(1, 1)) and not asked(torch.nn.Linear(1, 1))
    kinds.append(SimpleNamespace())  # what Megatron makes of a class derived from a missing one
    assert not asked(torch.nn.Linear(1, 1))


def test_a_micro_batch_that_was_not_planned_for_it_is_an_error():
    roll = partial(wrap_roll_tensor, lambda *_: "Megatron's")
    for rolled in (torch.ones(1, 4), [torch.ones(1, 4)]):
        assert roll(rolled) == "Megatron's"
        with pytest.raises(WlbError, match="not planned"):
            roll(rolled, packed_seq_params=WlbPackedSeqParams())


def test_the_mask_has_the_factors_of_the_whole_iteration(tmp_path):
    """Of 128 predictions in the iteration 64 are left after a roll and none after two: factors 2 and 0. The ranks of
    the micro-batch hold 6 of its own predictions: a document of 7 tokens has 6, its first 4 tokens alone have 4."""
    rewrite_corpus(tmp_path / "documents", [np.arange(7, dtype=np.int32), np.arange(2, dtype=np.int32)])
    corpus = Blend([str(tmp_path / "documents")])
    for pieces, predicted, further in (
        ([Piece(0, 0, 0, 7), Piece(0, 1, 0, 2)], 7, 5),
        ([Piece(0, 0, 0, 4), Piece(0, 1, 0, 2)], 5, 3),
        ([Piece(0, 0, 4, 7)], 2, 1),
    ):
        ranks = held_of(corpus, pieces, 2, 2, (128, 64, 0))
        assert sum(held.predicted for held in ranks) == predicted
        assert [held.predicted for held in ranks] == [float(held.loss_mask[0].sum()) for held in ranks]
        masks = torch.cat([held.loss_mask for held in ranks], dim=1)
        assert masks.sum(1).tolist() == [predicted, 2 * further, 0] and masks[1].unique().tolist() == [0, 2]


def one_at_a_time(tensor: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The dev branch's form, where Megatron itself sums the mask."""
    (rolled,) = wrap_roll_tensor(lambda *_: None, [tensor], **more)
    return rolled, rolled.sum()


@pytest.mark.parametrize(
    "roll", [partial(wrap_roll_tensor, lambda *_: None), one_at_a_time], ids=["release", "dev"]
)
def test_a_roll_gives_the_next_row_and_leaves_each_depth_its_factor_alone(roll):
    """Megatron multiplies by (predictions without a roll / the sum it gets, at least 1)."""
    of_depths = torch.tensor([[1.0, 1.0, 0.0], [1.25, 0.0, 0.0], [0.0, 0.0, 0.0]])
    tokens, labels, positions = (torch.arange(9).reshape(3, 3) + more for more in (0, 100, 200))
    params = WlbPackedSeqParams(further=(tokens, labels, of_depths, positions), predicted=2.0)
    mask, rolled, copied = of_depths[:1], [tokens[:1], positions[:1], labels[:1]], labels[:1].clone()
    for depth in (1, 2):
        mask, total = roll(mask, packed_seq_params=params, cp_group=None)
        weighed = mask * 2.0 / total.clamp(min=1)
        assert torch.equal(weighed, of_depths[depth : depth + 1]) and type(weighed) is torch.Tensor
        rolled = [roll(tensor, packed_seq_params=params)[0] for tensor in rolled]
        for tensor, rows in zip(rolled, (tokens, positions, labels), strict=True):
            assert torch.equal(tensor, rows[depth : depth + 1])
        copied = roll(copied, packed_seq_params=params)[0]
        assert torch.equal(copied, rolled[2])
    padding = torch.tensor([[False, False, True]])
    assert roll(padding, packed_seq_params=params)[0] is padding
    # A third depth, a second copy, a copied mask.
    for not_planned in (mask, tokens[:1].clone(), of_depths[:1].clone()):
        with pytest.raises(WlbError, match="not planned"):
            roll(not_planned, packed_seq_params=params)


def test_a_log_of_sums_over_predictions_is_not_corrected_for_micro_batches(monkeypatch):
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    def track(loss_scale: float) -> float:
        return loss_scale

    monkeypatch.setattr(logged_losses, "part", lambda kind: SimpleNamespace(factor=0.25))
    monkeypatch.delattr(MTPLossLoggingHelper, "save_loss_to_tracker", raising=False)
    assert wrap_track_metrics(track, 1.0) == 0.25

    def of_means(loss: Any, layer_number: int, num_layers: int) -> None:
        """Of releases before 0.19."""

    def of_sums(loss_sum: Any, num_tokens: Any, layer_number: int, num_layers: int) -> None:
        """Of the dev branch."""

    for save, scale in ((of_means, 0.25), (of_sums, 1.0)):
        monkeypatch.setattr(MTPLossLoggingHelper, "save_loss_to_tracker", save, raising=False)
        assert wrap_track_metrics(track, 1.0) == scale


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9)).map(
            lambda drawn: (sum(drawn), drawn[0], drawn[0] + drawn[1])
        ),
        max_size=8,
    ),
    at=st.lists(st.integers(1, 8), max_size=3),
    further=st.integers(0, 3),
)
def test_predictions_are_those_counted_token_by_token(pieces, at, further):
    expected = []
    for depth in range(further + 1):
        places = [(n, place, end) for n, start, end in pieces for place in range(start, end)]
        expected.append(sum(p + 1 < n and p + depth < end and p + depth + 1 < n for n, p, end in places))
    made, lengths = [], []
    for number, (length, start, end) in enumerate(pieces):  # each in chunks
        cuts = sorted({start, *(start + cut for cut in at if start + cut < end), end})
        made += [Piece(0, number, a, b, a - start) for a, b in pairwise(cuts)]
        lengths += [length] * (len(cuts) - 1)
    assert predictions(made, np.array(lengths, dtype=np.int64), further) == tuple(expected)


@pytest.mark.megatron
def test_documents_in_one_micro_batch_or_in_two_have_the_same_gradient(tmp_path):
    """22 documents of 3 tokens and one of 62: packed apart, their own factors would be 2.0 and 1.02 at depth 1."""
    write_corpus(tmp_path / "documents", [3] * 22 + [62])
    run = f"--mtp-num-layers 2 --train-iters 1 --data-path {tmp_path}/documents --wlb-max-delay 0"
    runs = {
        number: train(
            flags(run, f"--split 1,0,0 --global-batch-size {number} {more}"), 1, tmp_path / str(number)
        )
        for number, more in ((1, "--seq-length 128"), (2, ""))
    }
    documents = [[entry[2] for entry in run[0]["documents"]] for run in runs.values()]
    assert [len(of_micro_batch) for of_micro_batch in documents] == [1, 2]
    assert sorted(documents[0][0]) == sorted([*documents[1][0], *documents[1][1]])
    assert max(piece[3] - piece[2] for piece in documents[0][0]) == 62
    joined, apart = (whole_gradients(run) for run in runs.values())
    for name, gradient in joined.items():
        assert torch.linalg.norm(apart[name] - gradient) <= 1e-5 * torch.linalg.norm(gradient), name


def test_a_model_of_several_depths_on_an_earlier_stage_is_refused():
    args = SimpleNamespace(micro_batch_size=1, mtp_num_layers=1, pipeline_model_parallel_layout="Et|tmL")
    refuse_unsupported(args, WlbConfig())
    args.pipeline_model_parallel_layout = "Et|tm|L"
    with pytest.raises(Refused, match="the last stage"):
        refuse_unsupported(args, WlbConfig())


def test_multi_token_prediction_is_refused_where_its_roll_has_another_form(monkeypatch):
    from megatron.core.transformer import multi_token_prediction

    def roll_tensor(tensors: list[torch.Tensor], shifts: int = -1) -> list[torch.Tensor]:
        return tensors

    monkeypatch.setattr(multi_token_prediction, "roll_tensor", roll_tensor)
    assert not any(hook.place.endswith(":roll_tensor") for hook in hooks.rows())
    refuse_other_form(0)
    with pytest.raises(Refused, match="error: --mtp-num-layers"):
        refuse_other_form(1)
