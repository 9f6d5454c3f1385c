"""Variable-length micro-batches with delay of outliers (WLB-LLM, algorithm 1, with what the paper leaves open)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.assign import assign_ranks
from wlb_megatron.packing.bins import Bins
from wlb_megatron.packing.outlier_queues import Item, OutlierQueues
from wlb_megatron.packing.packer import Packed, Waiting, check_settings, decode, encode
from wlb_megatron.plan import Piece
from wlb_megatron.workload.cost_model import CostModel


def longest_micro_batch(config: WlbConfig, window: int, alignment: int = 1) -> int:
    """Lmax: config.max_tokens or 1.5 windows, down to a multiple of `alignment`. Raises ValueError below 1.25 windows.

    Documents are not cut, so a micro-batch cannot always be filled: with less, documents would pile up.
    """
    tokens = int(1.5 * window) if config.max_tokens is None else config.max_tokens
    tokens = tokens // alignment * alignment
    if 4 * tokens < 5 * window:
        raise ValueError(
            f"max_tokens of {tokens} is below 1.25 windows ({-(-5 * window // 4)} tokens), in which uncut documents "
            "cannot be packed without piling up: raise --wlb-max-tokens, or use --wlb-packing fixed-greedy"
        )
    return tokens


class VarlenPacker:
    """Whole documents in micro-batches of different length and like work."""

    intake_batches = 1

    def __init__(
        self,
        cost: CostModel,
        *,
        window: int,
        bins: int,
        capacity: int,
        thresholds: Sequence[int],
        max_delay: int,
        max_documents: int,
        dp: int = 1,
        pp: int = 1,
    ) -> None:
        """bins: micro-batches of the global batch. capacity: Lmax (tokens)."""
        self._cost = cost
        self._window = window
        self._count = bins
        self._capacity = capacity
        self._max_delay = max_delay
        self._max_documents = max_documents
        self._dp, self._pp = dp, pp
        self._queues = OutlierQueues(thresholds)
        self._left: list[Item] = []

    @classmethod
    def from_config(
        cls,
        config: WlbConfig,
        cost: CostModel,
        *,
        window: int,
        micro_batches: int,
        dp: int,
        pp: int,
        alignment: int,
        sample: Sequence[int] | None,
    ) -> VarlenPacker:
        if config.max_delay < 0:
            raise ValueError(f"max_delay must not be negative, got {config.max_delay}")
        if config.max_documents < 1:
            raise ValueError(f"max_documents must be at least 1, got {config.max_documents}")
        return cls(
            cost,
            window=window,
            bins=micro_batches * dp,
            capacity=longest_micro_batch(config, window, alignment),
            thresholds=read_thresholds(config.thresholds, window),
            max_delay=config.max_delay,
            max_documents=config.max_documents,
            dp=dp,
            pp=pp,
        )

    @property
    def waiting(self) -> tuple[Piece, ...]:
        return tuple(item.piece for item in self._waiting())

    def _waiting(self) -> list[Item]:
        return sorted([*self._left, *self._queues], key=lambda item: item.entry)

    def pack(self, iteration: int, arrived: Sequence[Piece], draining: bool = False) -> Packed:
        ready = self._left
        for item in self._price(arrived, iteration):
            if self._queues.level_of(item.tokens) >= 0:
                self._queues.put(item)
            else:
                ready.append(item)
        for level in self._queues.levels:
            while level and (draining or iteration - level[0].entry >= self._max_delay):
                ready.append(level.popleft())
            while len(level) >= self._count:
                ready += [level.popleft() for _ in range(self._count)]
        while len(ready) < self._count and len(self._queues):
            level = min((q for q in self._queues.levels if q), key=lambda q: q[0].entry)
            ready.append(level.popleft())
        due = [item for item in ready if iteration - item.entry >= self._max_delay]
        rest = [item for item in ready if iteration - item.entry < self._max_delay]
        due.sort(key=lambda item: -item.work)
        rest.sort(key=lambda item: -item.work)
        bins = Bins(self._count, self._capacity, self._max_documents)
        late = bins.place(due)
        self._left = late + bins.place(rest)
        return Packed(assign_ranks(bins.freeze(), self._dp, self._pp))

    def _price(self, pieces: Sequence[Piece], entry: int) -> list[Item]:
        lengths = [piece.end - piece.start for piece in pieces]
        if max(lengths, default=0) > self._window:
            long = pieces[lengths.index(max(lengths))]
            raise ValueError(
                f"document {long.document} has {max(lengths)} tokens, above the window of {self._window}: "
                "split it before packing"
            )
        work = self._cost.work(lengths).tolist()
        return [Item(w, n, entry, piece) for w, n, piece in zip(work, lengths, pieces, strict=True)]

    def state(self) -> dict[str, Any]:
        waiting = [Waiting(item.piece, item.entry) for item in self._waiting()]
        return {"settings": self._settings(), "waiting": encode(waiting)}

    def load_state(self, state: dict[str, Any]) -> None:
        check_settings(state["settings"], self._settings())
        self._left = []
        self._queues = OutlierQueues(self._queues.thresholds)
        for piece, entry in decode(state["waiting"]):
            (item,) = self._price([piece], entry)
            if self._queues.level_of(item.tokens) >= 0:
                self._queues.put(item)
            else:
                self._left.append(item)

    def _settings(self) -> dict[str, Any]:
        return {
            "packing": "varlen",
            "window": self._window,
            "global_micro_batches": self._count,
            "max_tokens": self._capacity,
            "max_delay": self._max_delay,
            "max_documents": self._max_documents,
            "thresholds": list(self._queues.thresholds),
        }


def read_thresholds(text: str, window: int) -> tuple[int, ...]:
    """Thresholds (tokens) of `config.thresholds`: "none", "49152,90112", or "auto"."""
    if text == "none":
        return ()
    if text == "auto":
        return (window // 2,)
    try:
        thresholds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"thresholds {text!r}: give auto, none, or rising token counts such as 49152,90112"
        ) from None
    OutlierQueues(thresholds)  # checks that they rise
    return thresholds
