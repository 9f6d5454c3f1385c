"""`inspect`: worked examples by hand, and what every plan must satisfy, read from the JSON alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packing_oracle import QUICK_PACKINGS

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.inspect_plans import inspect_plans
from wlb_megatron.pipeline.kept_layers import Load
from wlb_megatron.pipeline.orders import grouped_orders
from wlb_megatron.registry import SHARDINGS
from wlb_megatron.workload.memory import ModelChunk, StageMemory
from wlb_megatron.workload.model import Layout

Rows = list[list[int]]


def inspect(lengths: list[int], window: int, **options: Any) -> list[dict[str, Any]]:
    sizes = {"data": "dp", "context": "cp", "tensor": "tp", "micro_batches": "micro_batches"}
    layout = Layout(**{name: options.pop(short, 1) for name, short in sizes.items()})
    iterations = options.pop("iterations", None)
    config = WlbConfig(**{"packing": "original", "sharding": "per-document"} | options)
    tokens = np.array(lengths, dtype=np.int64)
    return inspect_plans(tokens, config, layout, window=window, iterations=iterations)["iterations"]


# --- worked examples ---


def test_two_documents_over_two_ranks_by_sequence_and_one_padded_by_a_last_piece_of_id_minus_1():
    (iteration,) = inspect([4, 12], 16, cp=2, sharding="per-sequence")
    # Slices of 4: rank 0 has packed tokens 0-3 and 12-15, rank 1 has 4-11.
    assert iteration["micro_batches"][0]["ranks"] == [[[0, 0, 4], [1, 8, 12]], [[1, 0, 8]]]
    (iteration,) = inspect([7], 8, cp=2)
    (micro_batch,) = iteration["micro_batches"]
    assert micro_batch["documents"] == [[0, 0, 7], [-1, 0, 1]]
    # Chunks of document 0: 2 2 2 1; the padding's one token lengthens the slot where the cursor stands, the last.
    assert micro_batch["ranks"] == [[[0, 0, 2], [0, 6, 7], [-1, 0, 1]], [[0, 2, 6]]]
    (iteration,) = inspect([6, 10], 8, micro_batches=2, cp=2)
    assert iteration["micro_batches"][1]["ranks"] == [
        [[1, 2, 4], [1, 7, 8], [1, 9, 10]],
        [[1, 4, 7], [1, 8, 9]],
    ]


@pytest.mark.parametrize(
    ("cp", "tp", "pad"), [(1, 4, 3), (4, 1, 3), (2, 1, 1), (4, 4, 3), (8, 4, 19), (1, 1, 0)]
)
def test_padding_reaches_a_multiple_of_cp_times_tp(cp: int, tp: int, pad: int) -> None:
    (iteration,) = inspect([13], 32, cp=cp, tp=tp)
    documents = iteration["micro_batches"][0]["documents"]
    assert documents == [[0, 0, 13]] + ([[-1, 0, pad]] if pad else [])


def test_original_cuts_at_the_window_and_the_pieces_stand_apart_each_with_its_own_mask() -> None:
    first, second = inspect([6, 10, 16], 8, micro_batches=2, cp=1)
    assert first["arrived"] == [[0, 0, 6], [1, 0, 8], [1, 8, 10]]  # the over-long one is split on arrival
    assert [m["documents"] for m in first["micro_batches"]] == [
        [[0, 0, 6], [1, 0, 2]],
        [[1, 2, 8], [1, 8, 10]],
    ]
    assert first["micro_batches"][1]["ranks"] == [[[1, 2, 8], [1, 8, 10]]], "side by side, and not merged"
    assert first["waiting"] == []
    assert [m["documents"] for m in second["micro_batches"]] == [[[2, 0, 8]], [[2, 8, 16]]]


def test_the_list_of_micro_batches_is_micro_batch_major() -> None:
    (iteration,) = inspect([4] * 6, 4, micro_batches=3, dp=2)
    assert [m["dp"] for m in iteration["micro_batches"]] == [0, 1, 0, 1, 0, 1]
    assert [m["documents"][0][0] for m in iteration["micro_batches"]] == [0, 1, 2, 3, 4, 5]


def test_intake_takes_the_document_that_crosses_and_no_more_and_iterations_stop_early():
    iterations = inspect([5, 5, 5, 5, 5], 8)
    # Totals reach 8, 16, 24: iteration 0 takes 5 + 5, iteration 1 takes two more, iteration 2 one.
    assert [[row[0] for row in it["arrived"]] for it in iterations] == [[0, 1], [2, 3], [4], []]
    assert [it["waiting"] for it in iterations][:2] == [[[1, 3, 5]], [[3, 1, 5]]]
    (only,) = inspect([5, 5, 5, 5, 5], 8, iterations=1)
    assert only["waiting"] == [[1, 3, 5]]


OUTLIERS = {"micro_batches": 2, "packing": "varlen", "thresholds": "8", "quadratic_at": 1}


def test_varlen_delays_a_document_above_the_threshold_until_there_is_one_for_each_micro_batch() -> None:
    # Two micro-batches of 10-token windows; a document of 8 alone would outweigh all else.
    lengths = [8, 3, 3, 3, 3] + [3] * 5 + [8, 3, 3, 3]
    iterations = inspect(lengths, 10, **OUTLIERS, max_delay=9)
    trained = [[row[0] for m in it["micro_batches"] for row in m["documents"]] for it in iterations]
    assert iterations[0]["waiting"] == [[0, 0, 8]]
    released = next(i for i, ids in enumerate(trained) if 0 in ids)
    assert 10 in trained[released]
    by_micro_batch = [[row[0] for row in m["documents"]] for m in iterations[released]["micro_batches"]]
    assert [len({0, 10} & set(ids)) for ids in by_micro_batch] == [1, 1]


def test_max_delay_forces_a_lone_outlier_in() -> None:
    iterations = inspect([8] + [3] * 60, 10, **OUTLIERS, max_delay=2)
    trained = [[row[0] for m in it["micro_batches"] for row in m["documents"]] for it in iterations]
    assert next(i for i, ids in enumerate(trained) if 0 in ids) == 2


# --- faults that others' users met ---


@pytest.mark.parametrize("packing", QUICK_PACKINGS)
def test_a_document_of_the_window_is_whole_and_one_more_token_follows_the_policy(packing: str) -> None:
    assert _trained(inspect([8], 8, packing=packing)) == [[0, 0, 8]]
    assert _trained(inspect([9], 8, packing=packing)) == [[0, 0, 8], [0, 8, 9]]
    assert _trained(inspect([9], 8, packing=packing, overlong="truncate")) == [[0, 0, 8]]
    assert _trained(inspect([9, 2], 8, packing=packing, overlong="drop")) == [[1, 0, 2]]


def test_a_document_counts_as_many_tokens_as_are_stored_and_trailing_zero_lengths_change_nothing():
    """No hidden token more: 16 stored run as 16, without padding; a cap of 150000 is reachable."""
    with pytest.raises(WlbError, match="quadratic_at must be positive"):
        inspect([4, 12], 16, quadratic_at=0.0)
    (iteration,) = inspect([16], 16, tp=4, cp=4)
    assert iteration["micro_batches"][0]["documents"] == [[0, 0, 16]]
    (iteration,) = inspect(
        [99_999, 50_001], 100_000, packing="varlen", max_tokens=150_000, tp=16, thresholds="none"
    )
    assert [m["documents"] for m in iteration["micro_batches"]] == [[[0, 0, 99_999], [1, 0, 50_001]]]
    assert inspect([16, 24, 0, 0], 64, cp=2) == inspect([16, 24], 64, cp=2)


def test_ids_and_positions_beyond_32_bits_are_exact() -> None:
    big = 2**33
    (iteration,) = inspect([big + 2], 2 * big, cp=2)
    quarter = big // 4
    assert iteration["micro_batches"][0]["ranks"] == [
        [[0, 0, quarter + 1], [0, 3 * quarter + 2, big + 2]],
        [[0, quarter + 1, 3 * quarter + 2]],
    ]


# --- what holds of every plan ---


def _all_rows(iterations: list[dict[str, Any]]) -> list[Rows]:
    rows = []
    for it in iterations:
        rows += [it["arrived"], it["waiting"]]
        for micro_batch in it["micro_batches"]:
            rows += [micro_batch["documents"], *micro_batch["ranks"]]
    return rows


def _trained(iterations: list[dict[str, Any]]) -> Rows:
    return sorted(
        row for it in iterations for m in it["micro_batches"] for row in m["documents"] if row[0] >= 0
    )


def _tokens(rows: Rows) -> list[tuple[int, int]]:
    return sorted((i, t) for i, start, end in rows for t in range(start, end))


@settings(deadline=None, max_examples=60)
@example(lengths=[0, 1, 0, 2], options={"window": 24, "packing": "varlen", "cp": 2})
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=40).filter(any),
    options=st.fixed_dictionaries(
        {
            "window": st.sampled_from([24, 48]),
            "packing": st.sampled_from(QUICK_PACKINGS),
            "sharding": st.sampled_from(list(SHARDINGS)),
            **dict.fromkeys(("micro_batches", "dp"), st.integers(1, 3)),
            "cp": st.integers(1, 4),
            "tp": st.integers(1, 2),
        }
    ),
)
def test_every_plan_trains_each_token_once_on_one_rank_and_has_no_empty_row(lengths, options):
    layout = {"micro_batches": 1, "dp": 1, "cp": 1, "tp": 1} | options
    micro_batches, dp, cp, tp = (layout[name] for name in ("micro_batches", "dp", "cp", "tp"))
    packing, window = options["packing"], options["window"]
    iterations = inspect(lengths, **options)
    assert all(row[1] < row[2] for rows in _all_rows(iterations) for row in rows)
    everything = sorted((i, t) for i, length in enumerate(lengths) for t in range(length))
    assert _tokens(_trained(iterations)) == everything
    assert _tokens([row for it in iterations for row in it["arrived"]]) == everything
    limit = int(1.5 * window) if packing == "varlen" else window
    arrived: Rows = []
    trained: Rows = []
    for number, it in enumerate(iterations):
        arrived += it["arrived"]
        trained += [row for m in it["micro_batches"] for row in m["documents"] if row[0] >= 0]
        assert _tokens(arrived) == _tokens(trained + it["waiting"])
        assert [m["dp"] for m in it["micro_batches"]] == list(range(dp)) * micro_batches
        for micro_batch in it["micro_batches"]:
            documents, ranks = micro_batch["documents"], micro_batch["ranks"]
            total = sum(end - start for _, start, end in documents)
            assert total > 0
            assert total % (cp * tp) == 0
            assert sum(end - start for i, start, end in documents if i >= 0) <= limit
            assert packing != "varlen" or total <= limit
            assert [row[0] for row in documents[:-1]].count(-1) == 0
            assert _tokens(documents) == _tokens([row for rank in ranks for row in rank])
            assert [sum(end - start for _, start, end in rank) for rank in ranks] == [total // cp] * cp
            if number < len(iterations) - 1:
                assert documents[0][0] >= 0  # only a drain's last iteration may hold padding alone
    assert iterations[-1]["waiting"] == []


# --- with a model: which layers each step keeps ---

LENGTHS = (300, 40, 9, 64, 17, 128, 33, 50, 20, 8) * 3

MEMORY = "--hidden-size 64 --num-attention-heads 4 --num-layers 8 --vocab-size 64 --recompute full"
KEPT = {
    "whole documents": f"--pp 2 --chunks off {MEMORY} --gpu-memory 0.0048",
    "chunks": f"--pp 2 --cp 2 --chunks on {MEMORY} --gpu-memory 0.0030",
    "a model chunk for each half": f"--pp 2 --vpp 2 --dp 2 --chunks off {MEMORY} --gpu-memory 0.0033",
    "blocks": f"--pp 2 --chunks off {MEMORY} --recompute-method block --recompute-num-layers 3 --gpu-memory 0.0048",
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_layers_of_the_json_fit_at_every_event_of_each_stage(name, reported):
    from recompute_oracle import by_the_flags, held_bytes

    job = f"--window 64 --micro-batches 6 --lengths {','.join(map(str, LENGTHS))} {KEPT[name]}"
    shown = reported(f"inspect {job}")
    flags = dict(zip(job.split()[::2], job.split()[1::2], strict=False))
    cp, vpp, dp = (int(flags.get(f"--{size}", 1)) for size in ("cp", "vpp", "dp"))
    stages = []
    for stage in shown["stages"]:
        available, chunks = stage.pop("available"), [ModelChunk(**chunk) for chunk in stage.pop("chunks")]
        assert sum(chunk.layers for chunk in chunks) == 4 and len(chunks) == vpp
        stages.append((available, StageMemory(chunks=tuple(chunks), **stage)))
    kept = of_flags = 0
    for iteration in shown["iterations"]:
        for rank in range(dp):
            mine = [entry for entry in iteration["micro_batches"] if entry["dp"] == rank]
            loads, groups = _loads_of_json(mine, cp)
            orders = grouped_orders(len(stages), groups or (1,) * len(mine), vpp)
            for at, (order, (available, memory)) in enumerate(zip(orders, stages, strict=True)):
                recomputed = [entry["recomputed"][at] for entry in mine]
                floor = by_the_flags(loads, memory)
                if recomputed != floor:
                    assert max(held_bytes(order, loads, memory, recomputed)) <= available
                kept, of_flags = kept + sum(map(sum, recomputed)), of_flags + sum(map(sum, floor))
    assert 0 < kept < of_flags, "some layers are kept, and not all"


def _loads_of_json(rows: list[dict[str, Any]], cp: int) -> tuple[list[Load], list[int]]:
    """Loads of a data-parallel rank's micro-batches, and the sizes of the groups that share a document."""
    sizes = [1]
    loads = []
    for before, row, after in zip([{}, *rows], rows, [*rows[1:], {}], strict=False):
        prefixes = row.get("prefix", [0] * len(row["documents"]))
        following = {
            piece[0]
            for piece, prefix in zip(after.get("documents", ()), after.get("prefix", ()), strict=False)
            if prefix
        }
        own = earlier = 0
        for (document, start, end), prefix in zip(row["documents"], prefixes, strict=True):
            if prefix or document in following:
                own, earlier = own + end - start, earlier + prefix
        if before:
            sizes = [*sizes[:-1], sizes[-1] + 1] if any(prefixes) else [*sizes, 1]
        tokens = sum(end - start for _, start, end in row["documents"])
        held = [-(-size // cp) for size in (tokens, own, earlier)]
        loads.append(Load(held[0], 1, *held[1:]))
    return loads, sizes


def test_without_a_model_nothing_is_said_of_layers(reported):
    job = "inspect --lengths 30,40,9 --window 64"
    shown = reported(job)
    assert list(shown) == ["iterations"]
    assert set(shown["iterations"][0]["micro_batches"][0]) == {"dp", "documents", "ranks"}
    assert list(reported(f"{job} {MEMORY} --gpu-memory 1 --wlb-recompute off")) == ["iterations"]


def test_chunks_are_weighed_by_times_where_a_model_is_known(command):
    """As analyze and training weigh them. Without a model, packing's own prediction does."""
    job = "--lengths 30,64,40,9,64,50,20,11 --window 64 --micro-batches 4 --pp 2 --iterations 1"
    model = "--model 550M --gpu-memory 80"
    analyze = f"analyze {job} {model} --no-split --search none --warm-up 0 --seed -1"
    own, inspected, analyzed = (
        next(line for line in command(words)[1].splitlines() if line.startswith("documents in chunks"))
        for words in (f"inspect {job}", f"inspect {job} {model}", analyze)
    )
    assert own not in (inspected, analyzed)
    for line in (own, inspected, analyzed):
        assert line.startswith("documents in chunks: no (predicted: 0.") and "times as fast" in line, line
