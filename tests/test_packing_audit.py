"""The planner's own count: a packer that loses, repeats or overfills is stopped, whatever its name."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_oracle import make_planner, run, token_counts
from test_packing_plans import WINDOW

from wlb_megatron.cli import main
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.baselines import OriginalPacker
from wlb_megatron.packing.packer import Packed
from wlb_megatron.packing.planner import audit
from wlb_megatron.plan import MicroBatch, Piece
from wlb_megatron.registry import PACKERS, PackerEntry


class DropsHalf(OriginalPacker):
    """Leaves out every other document."""

    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        return super().pack(iteration, arrived[::2], bins, draining)


class TrainsOneTwice(OriginalPacker):
    """Trains the first document in place of the second, which is as long."""

    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        return super().pack(iteration, [*arrived[:1], *arrived[:1], *arrived[2:]], bins, draining)


class SkipsTokens(OriginalPacker):
    """Trains tokens [0, 2) of the first document a second time in place of the last two."""

    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        first = arrived[0]
        cut = [first._replace(end=first.end - 2), first._replace(end=2)]
        return super().pack(iteration, [*cut, *arrived[1:]], bins, draining)


class IgnoresLmax(OriginalPacker):
    """Puts all micro-batches of an iteration into one."""

    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        grid = super().pack(iteration, arrived, bins, draining).grid
        pieces = tuple(piece for row in grid for micro_batch in row for piece in micro_batch.pieces)
        return Packed(((MicroBatch(pieces, 1),),))


TWICE = (
    "trains 48 and lets 0 wait, but document 0 of epoch 0 comes more often than it was given from token 0 on"
)
FAULTS = [
    (
        DropsHalf,
        "DropsHalf was given 48 tokens in iteration 0, trains 24 and lets 0 wait, but document 1 of epoch 0 is left "
        "out from token 0 on: this is a fault of the packer, please report it",
    ),
    (TrainsOneTwice, TWICE),
    (SkipsTokens, TWICE),
    (IgnoresLmax, "IgnoresLmax made a micro-batch of 48 tokens in iteration 0, above its limit of 24"),
]


@pytest.mark.parametrize(("kind", "words"), FAULTS)
def test_a_packer_that_breaks_its_promise_is_stopped_in_the_iteration_in_which_it_does(
    kind, words, monkeypatch
):
    monkeypatch.setitem(PACKERS, "mine", PackerEntry(f"{__name__}:{kind.__name__}", "mine"))
    planner = make_planner([12] * 40, window=WINDOW, micro_batches=2, packing="mine")
    with pytest.raises(WlbError) as raised:
        planner.next_iteration()
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_planning_command_ends_with_that_one_line(monkeypatch, capsys):
    monkeypatch.setitem(PACKERS, "original", PackerEntry(f"{__name__}:DropsHalf", "drops half"))
    code = main(["inspect", "--lengths", "4,4,4,4", "--window", "8", "--packing", "original"])
    out, err = capsys.readouterr()
    assert code == 2 and "DropsHalf was given 8 tokens in iteration 0, trains 4" in err
    assert err.count("\n") == 1 and "iteration" not in out


def test_a_packer_that_forgets_what_waited_is_stopped(monkeypatch):
    planner = make_planner([10] * 40, window=WINDOW, micro_batches=1, packing="original")
    planner.next_iteration()
    planner.packer._waiting.clear()
    with pytest.raises(WlbError, match="document 2 of epoch 0 is left out from token 4 on"):
        planner.next_iteration()


@settings(max_examples=200, deadline=None)
@given(
    *[
        st.lists(st.builds(lambda d, s, n: Piece(0, d, s, s + n), *map(st.integers, (0, 0, 1), (2, 4, 4))))
        for _ in range(2)
    ]
)
def test_the_count_is_right_just_where_each_token_is_there_as_often_as_before(before, after):
    """Against a count of single tokens; pieces of both may come in parts, repeat and overlap."""
    packer = make_planner([1], window=10_000, micro_batches=1, packing="original").packer
    grid = ((MicroBatch(tuple(after[::2]), 1),),)
    wrong = token_counts(before) != token_counts(after)
    for pieces in (before, after):  # cut somewhere: the same tokens
        cut = [
            p for q in pieces for p in (q._replace(end=q.end - 1), q._replace(start=q.end - 1)) if p.tokens
        ]
        whole = ((MicroBatch(tuple(cut), 1),),)
        assert audit(packer, 0, pieces, whole, ()) == sum(p.tokens for p in pieces)
    if wrong:
        with pytest.raises(WlbError, match="document"):
            audit(packer, 0, before, grid, after[1::2])
    else:
        audit(packer, 0, before, grid, after[1::2])


def test_a_run_with_cuts_chunks_and_waiting_documents_passes():
    lengths = [(37 * at) % WINDOW + 1 for at in range(60)]
    for how in ({"packing": "original"}, {"chunks": "on", "pp": 2}, {"thresholds": "6", "max_delay": 4}):
        planner = make_planner(lengths, window=WINDOW, micro_batches=2, endless=True, **how)
        assert len(run(planner, most=20)) == 20
