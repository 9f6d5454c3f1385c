"""Documents above the window that train whole, in chunks: how long they may be, and that a run goes on with them."""

import json
import re
from typing import Any

import numpy as np
import pytest

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.lengths import Bound, longest_whole
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.inspect_plans import inspect_plans
from wlb_megatron.workload.model import Layout


def test_the_least_limit_decides_and_every_one_is_told():
    positions, memory = Bound(200, "--max-position-embeddings"), Bound(150, "memory")
    longest, message = longest_whole("chunk", 64, 4, [positions], memory)
    assert longest == 150
    assert "up to 150 tokens (2.3 windows) train whole" in message
    for limit in ("share of an iteration 256", "--max-position-embeddings 200", "memory 150"):
        assert limit in message
    longest, message = longest_whole("chunk", 64, 2, [positions])
    assert longest == 128 and "what memory allows is not known here" in message
    assert longest_whole("split", 64, 4, [positions], memory) == (64, "")
    # Where no more than the window can train whole.
    longest, message = longest_whole("chunk", 64, 4, memory=Bound(20, "memory"))
    assert longest == 64 and "above the window of 64 tokens are split" in message


def plans(lengths: list[int], micro_batches: int, **how: Any) -> list[dict[str, Any]]:
    config = WlbConfig(**{"overlong": "chunk", "quadratic_at": 80.0, "micro_batch_cost": 2.0} | how)
    layout = Layout(pipeline=2, micro_batches=micro_batches)
    return inspect_plans(np.array(lengths), config, layout, window=64)["iterations"]


@pytest.mark.parametrize(("micro_batches", "parts"), [(4, [256]), (2, [128, 128]), (1, [64] * 4)])
def test_inspect_shows_a_document_of_four_windows_whole_where_an_iteration_has_four(micro_batches, parts):
    trained: list[int] = []
    for iteration in plans([10, 256, 30], micro_batches):
        ends: dict[int, int] = {}
        for one in iteration["micro_batches"]:
            for (document, start, end), prefix in zip(one["documents"], one.get("prefix", ()), strict=False):
                if document == 1:
                    ends[start - prefix] = end
        trained += [end - first for first, end in sorted(ends.items())]
    if micro_batches > 1:
        assert trained == parts


def stream(longest: int, overlong: str = "chunk") -> DocumentStream:
    lengths = [300, 5, 80, 64, 200, 9, 31]
    return DocumentStream.of_lengths(lengths, Rules(longest, overlong, seed=3, endless=True))


def test_a_resumed_run_splits_where_the_saved_one_did_and_one_that_can_hold_less_is_refused():
    first = stream(128)
    for _ in range(5):
        first.next()
    saved = json.loads(json.dumps(first.state()))
    second = stream(256)
    second.load_state(saved)
    assert second.rules.window == 128 and second.longest == 128
    assert [second.next() for _ in range(30)] == [first.next() for _ in range(30)]
    assert second.state() == first.state()
    saved = stream(256).state()
    with pytest.raises(WlbError, match="length of whole documents was 256, is 128"):
        stream(128).load_state(saved)
    with pytest.raises(WlbError, match="overlong was chunk, is split"):
        stream(256, "split").load_state(saved)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"chunks": "off"}, "--wlb-overlong chunk cannot be combined with --wlb-chunks off"),
        ({"packing": "original"}, "--wlb-overlong chunk needs --wlb-packing varlen"),
    ],
)
def test_it_is_refused_where_there_are_no_chunks(flags, message):
    with pytest.raises(WlbError, match=message):
        plans([10, 256], 4, **flags)


def test_analyze_tells_of_documents_above_the_window_whole_and_split(reported):
    layout = "--lengths 900,5000,20,3000,700,60,64 --window 1024 --micro-batches 4 --pp 2 --iterations 4 --warm-up 1"
    job = f"analyze {layout} --no-split --overlong"
    whole, split = (reported(f"{job} {how}")["results"]["after"] for how in ("chunk", "split"))
    # A document of 4,096 tokens needs an iteration's tokens at once, in more micro-batches than there are windows.
    assert whole["micro_batches"]["max"] > split["micro_batches"]["max"]
    assert whole["token_delay"]["max"] == 0


def test_inspects_table_tells_how_many_earlier_tokens_a_chunk_attends_to(command):
    flags = "--lengths 60,9 --window 64 --pp 2 --chunks on --quadratic-at 8 --micro-batch-cost 2"
    starts = re.findall(r"0\[(\d+), \d+\)(?:\+(\d+))?", command(f"inspect {flags}")[1])
    chunks = [start for start, prefix in starts if prefix]
    assert len(chunks) >= 2 and all(prefix in ("", start) for start, prefix in starts)
