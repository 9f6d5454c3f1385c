"""Random runs, stopped anywhere and resumed at another layout: the same documents, each token once, in time."""

import hashlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from packing_oracle import QUICK_PACKINGS, trained

from wlb_megatron.config import OVERLONG, WlbConfig
from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing import sample_choices
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.planner import BatchSchedule, Planner
from wlb_megatron.packing.varlen.varlen_packer import lmax
from wlb_megatron.plan import IterationPlan, Piece
from wlb_megatron.workload.cost_model import CostModel

Token = tuple[int, int, int]
"""Epoch, document, position."""

RUNS = dict.fromkeys(QUICK_PACKINGS, 40) | {"varlen": 120}
"""Random runs of every packer's name."""


@dataclass(frozen=True)
class Layout:
    """What a resumed run may change. dp divides the micro-batches of every global batch."""

    dp: int
    pp: int
    alignment: int


@dataclass(frozen=True)
class Run:
    """A random corpus, settings, and how long it trains: `iterations`, or to the end of a finite stream.

    steps: (samples, micro-batches of a global batch from there on).
    """

    config: WlbConfig
    corpora: tuple[Corpus, ...]
    rules: Rules
    steps: tuple[tuple[int, int], ...]
    iterations: int

    @property
    def bins(self) -> int:
        return self.steps[-1][1]

    def planner(self, layout: Layout, sample: list[int] | None = None) -> Planner:
        job = {"micro_batches": self.bins // layout.dp, "dp": layout.dp, "pp": layout.pp, "sample": sample}
        job |= {"window": self.rules.window, "alignment": layout.alignment}
        job["adopt_max_tokens"] = sys.maxsize if self.config.max_tokens is None else 0
        cost = CostModel(quadratic_at=self.rules.window / 4, per_document=0.5)
        packer = make_packer(PackingJob(self.config, cost, **job))
        schedule = BatchSchedule(self.steps)
        tokens = self.bins * self.rules.window
        return Planner(self.stream(), packer, global_tokens=tokens, schedule=schedule)

    def stream(self) -> DocumentStream:
        return DocumentStream(self.corpora, self.rules)

    @property
    def capacity(self) -> int:
        return self.rules.window if self.config.fixed_windows else lmax(self.config, self.rules.window)

    @property
    def latest(self) -> int:
        """Most iterations between a token's arrival and its training.

        Fixed windows: a piece waits for what came before it, less than two windows' worth, of which a global batch
        takes all unless windows are closed by their number of documents.
        """
        if not self.config.fixed_windows:
            assert self.config.max_delay is not None
            return self.config.max_delay
        return 1 + 2 * self.rules.window // (self.steps[0][1] * self.config.max_documents)


def draw_run(rng: np.random.Generator, packing: str) -> Run:
    """Windows of 16 to 64 tokens, 1 to 8 micro-batches, lengths of any shape, none of them above 3 windows."""
    window = 8 * int(rng.integers(2, 9))
    thresholds = ["auto", "none", f"{window // 2}", f"{window // 4},{window // 2},{window - 1}"]
    config = WlbConfig(
        micro_batches_per_window="1",
        packing=packing,
        max_tokens=[None, -(-window * 5 // 4 // 8) * 8 + 8, 2 * window, 3 * window][rng.integers(4)],
        max_delay=int(rng.choice([0, 1, 2, 5, 16])),
        thresholds=str(rng.choice(thresholds)),
        batch_spread=("auto", "none", "1", "1.25")[window // 8 % 4],
        max_documents=int(rng.choice([3, 8, 4096], p=[0.1, 0.1, 0.8])),
    )
    rules = Rules(
        window=window,
        overlong=str(rng.choice(OVERLONG)),
        seed=None if rng.random() < 0.2 else int(rng.integers(1 << 30)),
        endless=bool(rng.random() < 0.6),
    )
    corpora, first_id = [], 0
    for name in range(rng.integers(1, 4)):
        lengths = draw_lengths(rng, window)
        corpora.append(Corpus(f"corpus {name}", lengths, first_id, float(rng.choice([0.1, 1.0, 2.5]))))
        first_id += len(lengths)
    steps: tuple[tuple[int, int], ...] = ((0, int(rng.choice([1, 2, 3, 4, 6, 8]))),)
    if rng.random() < 0.4:
        unit, count = int(rng.integers(1, 4)), int(rng.integers(2, 4))
        sizes = unit * np.sort(rng.choice([1, 2, 3, 4], count, replace=False))
        later = np.sort(rng.choice(np.arange(1, 40), count - 1, replace=False))
        steps = tuple(zip([0, *later.tolist()], sizes.tolist(), strict=True))
    return Run(config, tuple(corpora), rules, steps, iterations=int(rng.integers(3, 13)))


def draw_lengths(rng: np.random.Generator, window: int) -> np.ndarray:
    count = int(rng.integers(1, 60))
    kind = rng.integers(5)
    if kind == 0:  # tiny ones, empty ones too
        lengths = rng.integers(0, 4, count)
    elif kind == 1:  # all of a like length, about half a window: hard to fit in pairs
        lengths = rng.integers(window // 2, window // 2 + 3, count)
    elif kind == 2:  # many short, few as long as the window
        lengths = np.where(rng.random(count) < 0.2, window, rng.integers(1, 6, count))
    elif kind == 3:
        lengths = np.minimum(rng.lognormal(np.log(window / 6), 1.2, count), 3 * window).astype(np.int64)
    else:
        lengths = rng.integers(0, 3 * window, count)
    return np.append(lengths, rng.integers(1, window + 1)).astype(np.int64)  # one that no policy leaves out


def draw_layout(rng: np.random.Generator, run: Run) -> Layout:
    common = math.gcd(*(size for _, size in run.steps))
    dp = int(rng.choice([d for d in range(1, common + 1) if common % d == 0]))
    return Layout(dp, pp=int(rng.integers(1, 5)), alignment=int(rng.choice([1, 2, 4, 8])))


def plans_of(planner: Planner, limit: int) -> Iterator[IterationPlan]:
    for _ in range(limit):
        plan = planner.next_iteration()
        if plan is None:
            return
        yield plan


def tokens_of(piece: Piece) -> list[Token]:
    return [(piece.epoch, piece.document, at) for at in range(piece.start, piece.end)]


def content(plan: IterationPlan) -> tuple[object, ...]:
    """What no layout changes of a plan: all but which rank and place a micro-batch has."""
    micro_batches = sorted((m.work, m.pieces) for row in plan.micro_batches for m in row)
    return plan.iteration, plan.arrived, micro_batches, plan.waiting


def digest(plans: list[IterationPlan]) -> str:
    return hashlib.sha256(repr(plans).encode()).hexdigest()


def check_run(run: Run, planner: Planner, limit: int) -> list[IterationPlan]:
    """Plan a whole run and hold every iteration against the rules; returns its plans."""
    waiting: dict[Token, int] = {}  # token -> iteration it arrived in
    gone: set[Token] = set()
    arrived: list[Piece] = []
    put_back = capped = False
    plans = []
    consumed = 0  # as Megatron counts: by the sizes of the global batches
    for plan in plans_of(planner, limit):
        plans.append(plan)
        micro_batches = [m for row in plan.micro_batches for m in row]
        assert len(micro_batches) == [size for at, size in run.steps if consumed >= at][-1]
        consumed += len(micro_batches)
        arrived += plan.arrived
        for piece in plan.arrived:
            for token in tokens_of(piece):
                assert token not in waiting and token not in gone, f"{token} arrived twice"
                waiting[token] = plan.iteration
        for micro_batch in micro_batches:
            assert sum(piece.tokens for piece in micro_batch.pieces) <= run.capacity
            if not run.config.fixed_windows:
                assert len(micro_batch.pieces) <= run.config.max_documents
            for piece in micro_batch.pieces:
                assert piece.tokens > 0
                for token in tokens_of(piece):
                    assert token in waiting, f"{token} trained twice, or before it arrived"
                    assert plan.iteration - waiting.pop(token) <= run.latest, f"{token} trained too late"
                    gone.add(token)
        left = [token for piece in plan.waiting for token in tokens_of(piece)]
        assert len(left) == len(waiting) and waiting.keys() == set(left)
        overdue = plan.iteration + 1 - run.latest
        assert all(entry >= overdue for entry in waiting.values()), "waits beyond its bound"
        state = planner.state()
        put_back = put_back or bool(state["put_back"])
        if not all(m.pieces for m in micro_batches):
            assert state["ended"] and not plan.waiting, "an empty micro-batch while documents wait"
        # No more pieces are taken in than can train.
        capped = capped or len(plan.arrived) >= planner.packer.most_pieces * len(micro_batches)
        if not state["ended"] and not put_back and not capped:
            # Else intake stops at the piece that reaches the goal.
            goal, total = consumed * run.rules.window, sum(p.tokens for p in arrived)
            assert total - arrived[-1].tokens < goal <= total
    check_against_the_stream(run, planner, arrived, ordered=not put_back)
    if not run.rules.endless:
        kept = [
            (c.first_id + d, int(n)) for c in run.corpora for d, n in enumerate(run.rules.kept(c.lengths))
        ]
        assert gone == {(0, document, at) for document, tokens in kept for at in range(tokens)}
    return plans


def check_against_the_stream(run: Run, planner: Planner, arrived: list[Piece], ordered: bool) -> None:
    """What arrived or was put back is the first pieces of a stream of its own, in its order."""
    back = [Piece(*row) for row in planner.state()["put_back"]]
    fresh = run.stream()
    first = [piece for _ in range(len(arrived) + len(back)) if (piece := fresh.next()) is not None]
    if ordered:
        assert arrived + back == first
    assert sorted(arrived + back) == sorted(first)


def check_resume(run: Run, rng: np.random.Generator, sample: list[int] | None = None) -> None:
    """One uninterrupted run against one stopped after any iteration and resumed at another layout."""
    before, after = draw_layout(rng, run), draw_layout(rng, run)
    limit = run.iterations if run.rules.endless else 500
    whole = run.planner(before, sample)
    plans = check_run(run, whole, limit)
    assert run.rules.endless or len(plans) < limit, "a finite stream does not end"
    stop = int(rng.integers(0, len(plans) + 1))

    stopped = run.planner(before, sample)
    assert digest(list(plans_of(stopped, stop))) == digest(plans[:stop]), "two planners differ"
    state, snapshot = json.loads(json.dumps(stopped.state())), stopped.snapshot()
    list(plans_of(stopped, 2))  # planned ahead and thrown away: no part of the state
    assert json.loads(json.dumps(snapshot())) == state, "a snapshot that is read late differs"

    resumed = run.planner(after, None)
    resumed.load_state(state)
    assert json.loads(json.dumps(resumed.state())) == state, "what is saved right after loading differs"
    rest = list(plans_of(resumed, limit - stop))
    assert [content(plan) for plan in rest] == [content(plan) for plan in plans[stop:]]
    assert all(len(plan.micro_batches[0]) == after.dp for plan in rest)
    assert resumed.state() == whole.state()

    again = run.planner(before, sample)
    again.load_state(state)
    assert digest(list(plans_of(again, limit - stop))) == digest(plans[stop:])


@pytest.mark.parametrize("packing", QUICK_PACKINGS)
def test_a_run_stopped_anywhere_and_resumed_at_any_layout_trains_what_the_uninterrupted_one_does(packing):
    for seed in range(RUNS[packing]):
        rng = np.random.default_rng([2026, seed])
        run = draw_run(rng, packing)
        try:
            check_resume(run, rng)
        except Exception as error:
            error.add_note(f"run {seed}: {run}")
            raise


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_so_does_one_whose_thresholds_were_learnt_from_a_sample_that_the_resumed_one_lacks(seed, monkeypatch):
    monkeypatch.setattr(sample_choices, "ITERATIONS", 24)  # finding them takes longest
    rng = np.random.default_rng([2028, seed])
    lengths = np.where(rng.random(300) < 0.1, rng.integers(100, 513, 300), rng.integers(1, 60, 300))
    rules = Rules(window=512, seed=seed, endless=True)
    config = WlbConfig(max_delay=8, micro_batches_per_window="1", chunks="off")
    run = Run(config, (Corpus("one", lengths),), rules, steps=((0, 4),), iterations=8)
    learnt, guessed = (
        run.planner(Layout(1, 1, 1), sample).state()["packer"]["settings"]["thresholds"]
        for sample in (lengths.tolist(), None)
    )
    assert learnt != guessed, "the sample taught nothing: the case shows nothing"
    check_resume(run, rng, lengths.tolist())


def test_the_random_runs_reach_what_they_are_to_show():
    """Runs of every kind occur, documents wait, and some are put back."""
    seen = {"endless": 0, "finite": 0, "blend": 0, "grew": 0, "waited": 0, "put back": 0, "cut": 0}
    for packing, seed in ((name, seed) for name in QUICK_PACKINGS for seed in range(0, RUNS[name], 2)):
        run = draw_run(np.random.default_rng([2026, seed]), packing)
        planner = run.planner(Layout(1, 1, 1))
        seen["endless" if run.rules.endless else "finite"] += 1
        seen["blend"] += len(run.corpora) > 1
        sizes = []
        for plan in plans_of(planner, 6):
            sizes.append(len(plan.micro_batches))
            if not run.config.fixed_windows:
                seen["waited"] += bool(plan.waiting)
                seen["put back"] += bool(planner.state()["put_back"])
            else:
                whole = set(plan.arrived)
                seen["cut"] += any(piece not in whole for piece in trained(plan))
        seen["grew"] += len(set(sizes)) > 1
    assert min(seen.values()) >= 5, seen
