"""One training run of convergence.py: wlb_megatron.pretrain_gpt, which also tells held-out loss by length of document.

python -m scripts.bench.convergence.convergence_run ARM OUT.json <Megatron's flags>
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.bench.convergence.controls import packing_of, unmasked
from wlb_megatron.plan import Piece
from wlb_megatron.plugin import pretrain_gpt
from wlb_megatron.plugin.micro_batches.loaded import LoadedMicroBatch
from wlb_megatron.plugin.step import forward_step as step
from wlb_megatron.whole_files import renamed_at_end

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Upper ends of the classes of lengths, in windows."""


class HeldOut:
    """Loss of evaluated tokens, summed by the length of their document. window: tokens of --seq-length."""

    def __init__(self, window: int) -> None:
        self._ends = [int(share * window) for share in SHARES]
        self._sums: torch.Tensor | None = None

    def add(self, batch: LoadedMicroBatch, losses: torch.Tensor) -> None:
        """batch: a micro-batch of one rank; losses: [1, t], of its tokens as the rank holds them."""
        planned, held = batch.planned, batch.held
        assert held is not None
        lengths = [piece.end - piece.start for piece in planned.pieces]
        classes = np.searchsorted(self._ends, lengths)
        rows = planned.shard.ranks[0]
        index = torch.from_numpy(np.repeat(classes[rows[:, 0]], rows[:, 2] - rows[:, 1])).to(losses.device)
        mask = held.loss_mask[0].to(losses.device).double()
        kinds = len(self._ends)
        sums = torch.stack(
            [
                torch.bincount(index, weights, kinds)
                for weights in (losses.detach().view(-1).double() * mask, mask)
            ]
        )
        self._sums = sums if self._sums is None else self._sums + sums

    def figures(self) -> dict[str, Any]:
        """Of each class: the upper end of lengths (tokens), the mean loss (nats a token, None without any), tokens."""
        if self._sums is None:
            raise SystemExit("nothing was evaluated")
        sums, counts = self._sums.tolist()
        return {
            "length_up_to": self._ends,
            "loss_by_length": [s / n if n else None for s, n in zip(sums, counts, strict=True)],
            "tokens_by_length": [round(n) for n in counts],
            "held_out_loss": sum(sums) / sum(counts),
        }


class Trained:
    """What training tokens see of their documents, counted from plans."""

    def __init__(self) -> None:
        self._tokens = self._cut = self._seen = 0

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            tokens = piece.tokens
            self._tokens += tokens
            self._cut += tokens if piece.start > piece.prefix else 0
            self._seen += tokens * (tokens - 1) // 2 + tokens * piece.prefix

    def figures(self) -> dict[str, float]:
        """The share of tokens whose document was cut somewhere before them, and how many earlier tokens of it a token
        sees, in mean."""
        return {"after_a_cut": self._cut / self._tokens, "earlier_tokens_seen": self._seen / self._tokens}


@contextmanager
def recorded_by(held_out: HeldOut, trained: Trained, *, masked: bool) -> Iterator[None]:
    """Within it evaluated losses go to `held_out`, pieces that train to `trained`. masked: documents do not see each
    other in training."""
    usual = step.forward_step

    def forward_step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        batch = next(data_iterator)
        if model.training:
            trained.add(batch.planned.pieces)
            batch = batch if masked else unmasked(batch)
        output, loss = usual(iter([batch]), model, *args, **kwargs)
        if not model.training:
            held_out.add(batch, output)
        return output, loss

    step.forward_step = forward_step
    try:
        yield
    finally:
        step.forward_step = usual


def main() -> None:
    arm, out = sys.argv[1], Path(sys.argv[2])
    sys.argv = [sys.argv[0], *sys.argv[3:]]
    held_out = HeldOut(int(sys.argv[len(sys.argv) - 1 - sys.argv[::-1].index("--seq-length") + 1]))
    trained = Trained()
    with packing_of(arm), recorded_by(held_out, trained, masked=arm != "unmasked"):
        pretrain_gpt.main()
    with renamed_at_end(out) as scratch:
        scratch.write_text(json.dumps(held_out.figures() | trained.figures()), encoding="utf-8")


if __name__ == "__main__":
    main()
