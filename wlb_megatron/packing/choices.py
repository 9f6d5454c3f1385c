"""What a run has chosen and keeps: checkpoints hold it, and a resumed run goes on with it until a flag says otherwise.

A setting left to `auto` may come to something else on another layout. A run that changed it halfway would not be the
same run any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.packer import Packer
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker


def chosen(config: WlbConfig, packer: Packer) -> dict[str, Any]:
    """A run's choices, JSON-able, by the field of WlbConfig that asks for each.

    Args:
        token_weights: step or equal.
        fresh_order: the order of documents was begun as --wlb-fresh-order asks, which is not done again when the job
            is requeued.
        chunks: long documents train in chunks.
        keeps_layers: micro-batches are chosen by a law that knows what recomputation each number of them costs.
        batch_spread: see Packer.
    """
    return {
        "token_weights": _token_weights(config, packer),
        "fresh_order": config.fresh_order,
        "chunks": isinstance(packer, ChunkPacker),
        "keeps_layers": packer.law.rooms is not None,
        "batch_spread": packer.batch_spread,
    }


def saved_choices(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """The choices of the run that saved this packing state. Empty where there is none, or it cannot be read.

    States without a record of choices hold token_weights by itself. Those of 0.1.0 do not: a token weighed by its step
    there. Whether documents were in chunks is among their packer's settings. None of them bounds a step's tokens.
    """
    if not state:
        return {}
    before = {
        "token_weights": state.get("token_weights", "step"),
        "keeps_layers": False,
        "batch_spread": None,
    }
    with suppress(LookupError, TypeError):  # a damaged state is told when it is loaded
        before["chunks"] = "chunks" in state["planner"]["packer"]["settings"]
    return {**before, **state.get("choices", {})}


def began_otherwise(config: WlbConfig, packer: Packer, saved: Mapping[str, Any]) -> WlbConfig | None:
    """The settings by which the packer must be made anew to go on as the checkpoint's run began: with documents in
    chunks, or whole, as there, and by its law. None if it does already. saved: see saved_choices."""
    if not saved or config.fixed_windows:
        return None
    now = chosen(config, packer)
    auto = config.chunks == "auto" and config.overlong != "chunk" and config.cp_mode == "fixed"
    changed = auto and saved.get("chunks", now["chunks"]) != now["chunks"]
    if changed:
        config = replace(config, chunks="on" if saved["chunks"] else "off")
    return config if changed or (now["keeps_layers"] and not saved.get("keeps_layers")) else None


def keep(config: WlbConfig, packer: Packer, saved: Mapping[str, Any]) -> tuple[WlbConfig, list[str]]:
    """The settings with the choices that the checkpoint's run made, and what there is to say of them.

    saved: see saved_choices; empty where the checkpoint holds none, so that this run makes its own.
    """
    if not saved:
        return config, []
    before, now = saved["token_weights"], _token_weights(config, packer)
    lines = []
    if config.token_weights == "auto":
        config = replace(config, token_weights=before)
        if before != now:
            lines = [
                f"--wlb-token-weights stays {before}, as the run began: auto would be {now} on this layout"
            ]
    elif before != now:
        lines = [f"--wlb-token-weights is {now} from here on, where the checkpoint's run had {before}"]
    return replace(config, fresh_order=config.fresh_order or saved.get("fresh_order", False)), lines


def _token_weights(config: WlbConfig, packer: Packer) -> str:
    return "equal" if weighs_equally(config, packer) else "step"


def weighs_equally(config: WlbConfig, packer: Packer) -> bool:
    """The choice `auto` weighs tokens equally where documents may wait. Those train in fuller steps, so a mean over
    the step's tokens would give their tokens less weight. Measured: docs/measured.md, equal weights of tokens."""
    if config.token_weights == "auto":
        return isinstance(packer, VarlenPacker) and packer.longest_delay > 0
    return config.token_weights == "equal"
