"""Multi-token prediction: a token's next ones are its own document's, on whatever rank they are held."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_runs import rewrite_corpus

from wlb_megatron.attention.core_attention import WlbPackedSeqParams
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.blend import Blend
from wlb_megatron.packing.summary import PlanSummary
from wlb_megatron.plan import Piece
from wlb_megatron.plugin.data import Layout, PackedDocuments
from wlb_megatron.plugin.multi_token import next_in_document, wrap_roll_tensor
from wlb_megatron.plugin.planning import PlannedMicroBatch, pad
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
    found = next_in_document(values, after, None)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]


def test_a_micro_batch_that_was_not_planned_for_it_is_an_error() -> None:
    roll = wrap_roll_tensor(lambda *_: "Megatron's")
    assert roll(torch.ones(1, 4)) == "Megatron's"
    with pytest.raises(WlbError, match="not planned"):
        roll(torch.ones(1, 4), packed_seq_params=WlbPackedSeqParams())


def test_shares_are_of_what_the_micro_batch_predicts(tmp_path: Path) -> None:
    """Documents of 7 and 2 tokens predict 6 and 1; a piece cut off at token 4 predicts 4, for the next is known."""
    rewrite_corpus(tmp_path / "documents", [np.arange(7, dtype=np.int32), np.arange(2, dtype=np.int32)])
    corpus = Blend([str(tmp_path / "documents")])
    summary = PlanSummary(0, 0, 0, 0, 1.0, 1.0, 0, 0.0, 0, 0)
    for pieces, predicted in (
        ([Piece(0, 0, 0, 7), Piece(0, 1, 0, 2)], 7),
        ([Piece(0, 0, 0, 4), Piece(0, 1, 0, 2)], 5),
        ([Piece(0, 0, 4, 7)], 2),
    ):
        padded = pad(tuple(pieces), 4)
        plan = shard(np.array([piece.tokens for piece in padded]), 2, "per-document")
        planned = PlannedMicroBatch(0, 0, padded, plan, summary, 0.0)
        ranks = [
            PackedDocuments(corpus, Layout(rank, 1, 8, True, follows=True))[planned] for rank in range(2)
        ]
        counts = [float(batch["loss_mask"].sum()) for batch in ranks]
        assert sum(counts) == predicted
        assert [batch["share"] for batch in ranks] == [count / predicted for count in counts]
        assert all(batch["following"].tolist() == following(plan).tolist() for batch in ranks)


def test_the_sum_told_makes_one_factor_for_all_ranks() -> None:
    """3 of 4 predictions are this rank's; 2 remain after the roll: told 1.5, and 3 / 1.5 is 4 / 2."""
    after = torch.tensor([1, 2, 4, 4], dtype=torch.int32)
    params = WlbPackedSeqParams(following=after, share=0.75)
    roll = wrap_roll_tensor(lambda *_: None)
    rolled, told = roll(torch.ones(1, 4), packed_seq_params=params, cp_group=None)
    assert rolled.tolist() == [[1, 1, 0, 0]]
    assert told == 1.5
    few = WlbPackedSeqParams(
        following=after, share=0.25
    )  # 1 of 4: 2 remain, told 0.5, which Megatron takes for 1
    rolled, told = roll(torch.ones(1, 4), packed_seq_params=few, cp_group=None)
    assert (rolled * 1 / told.clamp(min=1)).tolist() == [[2, 2, 0, 0]]
    rolled, told = roll(rolled, packed_seq_params=few, cp_group=None)  # one remains: 1 / 1 of 4 is 4
    assert (rolled * 1 / told.clamp(min=1)).tolist() == [[4, 0, 0, 0]]
    rolled, told = roll(rolled, packed_seq_params=few, cp_group=None)
    assert not rolled.any() and told == 0
    mask = torch.tensor([[False, False, False, True]])
    assert roll(mask, packed_seq_params=params)[0] is mask


def test_a_model_of_several_depths_on_an_earlier_stage_is_refused() -> None:
    from wlb_megatron.config import WlbConfig
    from wlb_megatron.refusals import Refused, refuse_unsupported

    args = SimpleNamespace(micro_batch_size=1, mtp_num_layers=1, pipeline_model_parallel_layout="Et|tmL")
    refuse_unsupported(args, WlbConfig())
    args.pipeline_model_parallel_layout = "Et|tm|L"
    with pytest.raises(Refused, match="the last stage"):
        refuse_unsupported(args, WlbConfig())
