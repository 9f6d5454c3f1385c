"""Continuing the document order of a checkpoint, or refusing with what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wlb_megatron.plugin import checkpoint
from wlb_megatron.plugin.batch_sizes import misfit
from wlb_megatron.plugin.source import Source
from wlb_megatron.refusals import Refused


def remember(source: Source, planner_state: Callable[[], dict[str, Any]], *, applied: bool = True) -> None:
    """Make the planner's state after an iteration part of the next checkpoint. applied: else not before Megatron
    has applied its gradients."""
    keep, settings = checkpoint.remember if applied else checkpoint.remember_if_applied, _settings_of(source)
    keep(lambda: {"settings": settings, "planner": planner_state()})


def restore(source: Source, args: Any) -> None:
    """Bring the planner to where the loaded checkpoint was saved. SystemExit with one line if it cannot continue."""
    if args.iteration:  # else a new run, or --finetune
        _continue(source, args)
    planner = source.planner
    for size in planner.schedule.from_now(planner.samples):
        if wrong := misfit(size, args):
            raise Refused(f"wlb_megatron: this run comes to global batches that cannot train: {wrong}")


def _continue(source: Source, args: Any) -> None:
    state, planner = checkpoint.loaded_state(), source.planner
    if state is not None:
        _check_settings(state["settings"], _settings_of(source))
        try:
            planner.load_state(state["planner"])
        except ValueError as error:
            raise Refused(f"wlb_megatron: {error}") from None
        if planner.samples != args.consumed_train_samples:
            raise Refused(
                f"wlb_megatron: the packing state has trained {planner.samples} samples, the checkpoint of iteration "
                f"{args.iteration} {args.consumed_train_samples}: load the checkpoint as it was saved"
            )
    elif source.config.fresh_order:
        planner.begin_at(args.consumed_train_samples)
    else:
        raise Refused(
            f"wlb_megatron: the checkpoint of iteration {args.iteration} holds no packing state, so which documents "
            "it has trained is not known: add --wlb-fresh-order to begin the document order anew"
        )


def _settings_of(source: Source) -> dict[str, Any]:
    """What plans depend on beside what the planner's own state checks."""
    return {"quadratic_at": source.config.quadratic_at, "document_cost": source.config.document_cost}


def _check_settings(saved: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [
        f"--wlb-{name.replace('_', '-')} was {saved.get(name)}, now {value}"
        for name, value in now.items()
        if saved.get(name) != value
    ]
    if changed:
        raise Refused(
            f"wlb_megatron cannot resume with other settings of the work: {'; '.join(changed)}; set them as before"
        )
