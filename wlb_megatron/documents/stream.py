"""The stream of documents that packing draws from: one corpus or a blend, in the same order on every rank.

It goes through each corpus document by document: an epoch's order, over-long documents cut, empty ones dropped. A
document's identity is (epoch, document). Each corpus of a blend has its own epochs. The state holds only ids and
counts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.corpus import Corpus, IntArray, Lengths, PieceOrder, Rules, blocks
from wlb_megatron.errors import WlbError, changes
from wlb_megatron.plan import Piece

EPOCH, DOCUMENT, START, END, CURSOR, RESUME, TOKENS, EMPTY, OVERLONG_COUNT, LOST = range(10)
"""Columns of a walk's rows: the piece (first four), then the walk's place and counts once it is taken."""

VERSION = 3
"""Version of a stream's state, and of the order in which its run continues."""

STATE = {
    "epoch": EPOCH,
    "cursor": CURSOR,
    "resume": RESUME,
    "tokens": TOKENS,
    "empty": EMPTY,
    "overlong": OVERLONG_COUNT,
    "lost_tokens": LOST,
}
"""A walk's state by column: places passed in this epoch, pieces already out of the next one, running counts. (Where a
document's pieces come after each other: the tokens that are out of them.)"""

_BLOCK = 4096


class CorpusWalk:
    """Goes through a corpus by the rules, a block of pieces at a time. `position`: the corpus's in the blend."""

    def __init__(self, corpus: Corpus, rules: Rules, position: int) -> None:
        if not any(rules.kept(lengths).any() for lengths in blocks(corpus.lengths)):
            raise WlbError(
                f"{corpus.name}: no token to train on in {len(corpus.lengths)} documents "
                f"(window {rules.window}, over-long documents: {rules.overlong}); give another corpus or window"
            )
        self._corpus, self._rules, self.position = corpus, rules, position
        # Only where they are split is a document several pieces.
        window = rules.window if rules.splits else np.iinfo(np.int64).max
        self._order = PieceOrder(corpus.lengths, window)
        self._begun: tuple[object, ...] | None = None  # what the order is of
        self.place(np.zeros(10, dtype=np.int64))

    def place(self, row: IntArray) -> None:
        """Go on after this row; only its STATE columns matter."""
        self.row = row.copy()  # where the walk stands
        self._begin_epoch()
        self._fill(int(row[CURSOR]), int(row[RESUME]) // self._piece_unit)

    @property
    def finished(self) -> bool:
        last = self._rules.epochs if self._rules.endless else 1
        return last is not None and int(self.row[EPOCH]) + 1 >= last and self._epoch_is_out

    @property
    def _epoch_is_out(self) -> bool:
        return self._taken >= len(self._ahead.place) and self._end >= len(self._corpus.lengths)

    def advance(self) -> IntArray:
        """int64[k, 10]: the next pieces, k >= 1, or k = 0 after the last one of a single pass."""
        while not self.finished:
            if self._epoch_is_out:
                self.row[[EPOCH, CURSOR, RESUME]] = self.row[EPOCH] + 1, 0, 0
                self._begin_epoch()
                self._fill(0)
            elif self._taken >= len(self._ahead.place):
                self._fill(self._end)
            else:
                rows = self._next_rows()
                if len(rows):
                    return rows
        self.row[CURSOR] = len(self._corpus.lengths)
        return np.empty((0, 10), dtype=np.int64)

    def _begin_epoch(self) -> None:
        epoch, seed = int(self.row[EPOCH]), self._rules.seed
        is_spread = seed is not None
        self._piece_unit = 1 if is_spread else self._rules.window
        order_key = epoch, self.position
        if self._begun != order_key:
            seeds = None if seed is None else [seed, self.position, epoch]
            self._order.begin(seeds, is_spread=is_spread)
            self._begun = order_key

    def _fill(self, begin: int, out: int = 0) -> None:
        """Take the epoch's next places, from `begin` on. out: entries of the first one that are given out already."""
        self._end = min(begin + self._order.width(_BLOCK), len(self._corpus.lengths))
        self._ahead, self._taken = self._order.between(begin, self._end), out

    def _next_rows(self) -> IntArray:
        """Rows of the next block of entries; moves the walk behind them.

        Window 4, split, lengths [0, 10, 3], as they stand: (1, 0, 4), (1, 4, 8), (1, 8, 10), (2, 0, 3).
        """
        block = slice(self._taken, self._taken + _BLOCK)
        places = self._ahead.place
        entries = np.arange(len(places))[block]
        # A place's entries are all in one stretch.
        last_of_place = np.append(places[1:] > places[:-1], True)[block]
        entry_in_place = entries - np.searchsorted(places, places[block])
        documents = self._ahead.document[block]
        window, before = self._rules.window, self.row
        lengths = self._corpus.lengths[documents].astype(np.int64)
        kept_tokens = self._rules.kept(lengths)
        start = self._ahead.start[block]
        end = np.minimum(start + window, kept_tokens)
        ends_document = end >= kept_tokens  # of the document, with this piece
        rows = np.zeros((len(entries), 10), dtype=np.int64)
        rows[:, EPOCH] = before[EPOCH]
        rows[:, DOCUMENT] = self._corpus.first_id + documents
        rows[:, START], rows[:, END] = start, end
        rows[:, CURSOR] = places[block] + last_of_place
        rows[:, RESUME] = np.where(last_of_place, 0, (entry_in_place + 1) * self._piece_unit)
        for column, amounts in (
            (TOKENS, end - start),
            (EMPTY, ends_document & (lengths == 0)),
            (OVERLONG_COUNT, ends_document & (lengths > window)),
            (LOST, ends_document * (lengths - kept_tokens)),
        ):
            rows[:, column] = before[column] + np.cumsum(amounts)
        self._taken += len(entries)
        self.row = rows[-1].copy()
        return rows[end > start]


class DocumentStream:
    """Pieces of at most rules.window tokens, one at a time.

    A blend gives the next piece from the corpus that has had the fewest tokens for its weight so far (on a tie, the
    first): weights are shares of tokens, as in Megatron. The order depends on the seed, the epoch and the corpus's
    position in the blend, so a corpus given twice comes in two orders. A state keeps the positions: see carry.py.
    """

    def __init__(self, corpora: Sequence[Corpus], rules: Rules) -> None:
        """WlbError if there is no corpus, or one has no token to give. Their ids must not overlap."""
        if not corpora:
            raise WlbError("no corpus to draw documents from; give at least one")
        self.rules = rules
        self.fingerprint = _fingerprint(corpora, rules)
        self.names = [corpus.name for corpus in corpora]
        self._corpora = corpora
        self._weights = [corpus.weight for corpus in corpora]
        self._walks = [CorpusWalk(corpus, rules, position) for position, corpus in enumerate(corpora)]
        self._restart([walk.row.copy() for walk in self._walks])

    @classmethod
    def of_lengths(cls, lengths: npt.ArrayLike, rules: Rules, name: str = "lengths") -> DocumentStream:
        """Stream of one corpus whose documents have these lengths (tokens); ids are positions."""
        return cls([Corpus(name, np.asarray(lengths))], rules)

    @property
    def longest(self) -> int:
        """Tokens of the longest piece that it may give."""
        lengths = (int(block.max(initial=0)) for corpus in self._corpora for block in blocks(corpus.lengths))
        return min(self.rules.window, max(lengths))

    def first_pass(self) -> tuple[str, int]:
        """The corpus that is the first to have been passed once, and the tokens that all have given then."""
        tokens = (sum(int(b.sum(dtype=np.int64)) for b in blocks(corpus.lengths)) for corpus in self._corpora)
        total = sum(self._weights)
        tokens_out = [int(each * total / weight) for each, weight in zip(tokens, self._weights, strict=True)]
        return min(zip(self.names, tokens_out, strict=True), key=lambda item: item[1])

    def next(self) -> Piece | None:
        """The next piece; None after the last one of a single pass."""
        if self._taken == len(self._block):
            self._fill()
            if not self._block:
                return None
        self._taken += 1
        return self._block[self._taken - 1]

    def peek(self, max_pieces: int) -> list[int]:
        """Tokens of the next pieces, at most `max_pieces` of them, without taking any."""
        before = self.state()
        coming = [piece.end - piece.start for _ in range(max_pieces) if (piece := self.next()) is not None]
        self.load_state(before)
        return coming

    def state(self) -> dict[str, Any]:
        """JSON-able: after `load_state` of it, `next` gives what it would have given here."""
        corpora = [
            {**{name: int(row[column]) for name, column in STATE.items()}, "position": walk.position}
            for row, walk in zip(self._places(), self._walks, strict=True)
        ]
        return {"version": VERSION, "fingerprint": self.fingerprint, "corpora": corpora}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. WlbError, and no change, unless corpora and rules are the same.

        If documents longer than the window train whole, they are split at the state's length if that is less: the
        longest length depends on the layout, but a run's order must not.
        """
        version = state.get("version")
        if version != VERSION:
            raise WlbError(
                f"saved document stream has version {version}, this one reads {VERSION}; "
                "resume with the release that saved it"
            )
        try:
            rules = self._rules_of(state["fingerprint"])
            now = {**self.fingerprint, "window": rules.window}
            changed = _differences(state["fingerprint"], now, self.names)
            rows = [_row(saved) for saved in state["corpora"]]
            if any("earlier" in saved for saved in state["corpora"]):
                changed.append("its epoch began with another window")
            positions = [int(saved.get("position", number)) for number, saved in enumerate(state["corpora"])]
            damaged = not changed and len(rows) != len(self._walks)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            damaged = True
        if damaged:
            raise WlbError("saved document stream is damaged; resume from another checkpoint")
        if changed:
            raise WlbError(
                f"cannot resume the document stream: {'; '.join(changed)}; "
                "resume with the same corpora and settings"
            )
        if rules != self.rules:
            self.rules, self.fingerprint = rules, now
            self._walks = [CorpusWalk(corpus, rules, number) for number, corpus in enumerate(self._corpora)]
        for walk, position in zip(self._walks, positions, strict=True):
            walk.position = position
        self._restart(rows)

    def _rules_of(self, saved: Mapping[str, Any]) -> Rules:
        """The rules, with the saved length of whole documents where that is shorter."""
        if not self.rules.overlong == saved["overlong"] == "chunk":
            return self.rules
        return replace(self.rules, window=min(int(saved["window"]), self.rules.window))

    def _restart(self, rows: list[IntArray]) -> None:
        for walk, row in zip(self._walks, rows, strict=True):
            walk.place(row)
        self._settled = rows
        self._ahead = [np.empty((0, 10), dtype=np.int64) for _ in rows]  # cut, not yet in a block
        self._block: list[Piece] = []
        self._rows = np.empty((0, 10), dtype=np.int64)
        self._owner = np.empty(0, dtype=np.int64)
        self._taken = 0

    def _places(self) -> list[IntArray]:
        """Where each corpus stands after the pieces taken: the row of its last one in the block, if any."""
        last = np.full(len(self._settled), -1)
        # Once over all, not once a corpus.
        np.maximum.at(last, self._owner[: self._taken], np.arange(self._taken))
        return [
            settled if last_row < 0 else self._rows[last_row]
            for last_row, settled in zip(last.tolist(), self._settled, strict=True)
        ]

    def _fill(self) -> None:
        """The next block of pieces, empty if there is none.

        A piece's turn is (tokens its corpus gave before it) / weight. The block holds every piece whose turn is known
        to come before that of any piece not cut yet, by turn, then by corpus.
        """
        self._settled = self._places()
        horizon = float("inf")
        for position, walk in enumerate(self._walks):
            if not len(self._ahead[position]):
                self._ahead[position] = walk.advance()
            if not walk.finished:
                horizon = min(horizon, int(walk.row[TOKENS]) / self._weights[position])
        blocks, turns = [], []
        for position, rows in enumerate(self._ahead):
            turn = (rows[:, TOKENS] - (rows[:, END] - rows[:, START])) / self._weights[position]
            ready = int(np.searchsorted(turn, horizon))
            blocks.append(rows[:ready])
            turns.append(turn[:ready])
            self._ahead[position] = rows[ready:]
        order = np.argsort(np.concatenate(turns), kind="stable")
        self._rows = np.concatenate(blocks)[order]
        self._owner = np.repeat(np.arange(len(blocks)), [len(rows) for rows in blocks])[order]
        columns = [self._rows[:, column].tolist() for column in (EPOCH, DOCUMENT, START, END)]
        columns.append([0] * len(self._rows))  # no prefix
        # As Piece._make would make them, in half its time.
        self._block = list(map(tuple.__new__, repeat(Piece), zip(*columns, strict=True)))
        self._taken = 0
        if not self._block:  # passes what is empty after the last piece
            self._settled = [walk.row.copy() for walk in self._walks]


def _row(saved: Mapping[str, int]) -> IntArray:
    row = np.zeros(10, dtype=np.int64)
    for name, column in STATE.items():
        row[column] = saved[name]
    return row


def _fingerprint(corpora: Sequence[Corpus], rules: Rules) -> dict[str, Any]:
    """What the order depends on. Names are left out: a corpus may move to another folder."""
    return {
        "window": rules.window,
        "overlong": rules.overlong,
        "seed": rules.seed,
        "endless": rules.endless,
        "corpora": [
            {
                "documents": len(corpus.lengths),
                "tokens": int(corpus.lengths.sum()),
                "first_id": corpus.first_id,
                "weight": corpus.weight,
                "sha256 of lengths": _sha256(corpus.lengths),
                **({"digest of targets": corpus.targets} if corpus.targets else {}),
            }
            for corpus in corpora
        ],
    }


def _sha256(lengths: Lengths) -> str:
    """Hash of the lengths as little-endian int64."""
    digest = hashlib.sha256()
    for block in blocks(lengths):
        digest.update(block.astype("<i8", copy=False).data)
    return digest.hexdigest()


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """One phrase for each thing that changed."""
    window = "length of whole documents" if now["overlong"] == "chunk" else "window"
    rules = {key: value for key, value in now.items() if key != "corpora"}
    changed = changes(saved, rules, lambda key: window if key == "window" else key)
    before, after = saved["corpora"], now["corpora"]
    if len(before) != len(after):
        return [*changed, f"the blend had {len(before)} corpora, has {len(after)}"]
    for name, corpus_before, corpus_after in zip(names, before, after, strict=True):
        changed += [f"{name}: {change}" for change in changes(corpus_before, corpus_after)]
    return changed


def epochs(state: Mapping[str, Any]) -> list[float]:
    """Passes through each corpus: 1.25 is one whole pass, then a quarter of its documents again."""
    sizes = [corpus["documents"] for corpus in state["fingerprint"]["corpora"]]
    return [
        corpus["epoch"] + corpus["cursor"] / size
        for corpus, size in zip(state["corpora"], sizes, strict=True)
    ]


def distinguish(names: Sequence[str]) -> list[str]:
    """The names, numbered from the second occurrence of a name on: a, b, a #2."""
    occurrences: Counter[str] = Counter()
    numbered = []
    for name in names:
        occurrences[name] += 1
        numbered.append(name if occurrences[name] == 1 else f"{name} #{occurrences[name]}")
    return numbered


def figures_of_passes(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """For a log: epochs by corpus, the most of them, documents above the length at which they are split (truncated,
    dropped), and what was left out, so far."""
    passed = epochs(state)
    return {
        "epochs": {name: round(epochs_done, 4) for name, epochs_done in zip(names, passed, strict=True)},
        "most_epochs": max(passed),
        "overlong_documents": sum(corpus["overlong"] for corpus in state["corpora"]),
        "lost_tokens": sum(corpus["lost_tokens"] for corpus in state["corpora"]),
        "empty_documents": sum(corpus["empty"] for corpus in state["corpora"]),
    }


def describe_passes(figures: Mapping[str, Any], max_corpora: int = 4) -> str:
    """The part of a log line on passes: the corpora with the most passes, and what was left out."""
    passed = sorted(figures["epochs"].items(), key=lambda item: -item[1])
    is_alone = len(passed) == 1
    phrases = [
        f"{value:.3f}" + ("" if is_alone else f" {Path(name).name}") for name, value in passed[:max_corpora]
    ]
    line = " | epochs: " + ", ".join(phrases)
    if len(passed) > max_corpora:
        line += f", less of {len(passed) - max_corpora} others"
    if figures["overlong_documents"]:
        line += f" | documents above the window: {figures['overlong_documents']}"
        line += f", {figures['lost_tokens']} of their tokens left out" if figures["lost_tokens"] else ""
    return line
