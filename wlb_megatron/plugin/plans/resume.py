"""Continuing the document order of a checkpoint, or refusing with what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from wlb_megatron.documents.changes import changes
from wlb_megatron.packing.carry import Carried, take_up
from wlb_megatron.packing.choices import chosen, keep, saved_choices
from wlb_megatron.plugin.flags.batch_sizes import misfit, plan_decides
from wlb_megatron.plugin.plans import checkpoint
from wlb_megatron.plugin.plans.source import Source
from wlb_megatron.refusals import Refused


def remember(source: Source, planner_state: Callable[[], dict[str, Any]], *, applied: bool = True) -> None:
    """Make the planner's state after an iteration part of the next checkpoint. applied: else not before Megatron
    has applied its gradients."""
    store = checkpoint.remember if applied else checkpoint.remember_if_applied
    settings, choices = _settings_of(source), chosen(source.config, source.planner.packer)
    store(lambda: {"settings": settings, "choices": choices, "planner": planner_state()})


CURE = (
    "or add --wlb-fresh-order: documents that wait train first, known corpora continue where they were (with another "
    "--seed they begin an epoch), and new ones begin"
)


DAMAGE = (LookupError, TypeError, AttributeError, ArithmeticError, StopIteration)
"""What reading a damaged state raises, beside ValueError."""


class LoadedAt(NamedTuple):
    """Where Megatron goes on. samples: consumed in training (windows).

    Both are 0 in a new run, and with --finetune. A `release` checkpoint begins at iteration 0 with the samples of the
    run that it is of.
    """

    iteration: int
    samples: int

    @property
    def checkpoint(self) -> str:
        """Its name in messages."""
        return f"the checkpoint of iteration {self.iteration}" if self.iteration else "the release checkpoint"

    @property
    def begun(self) -> bool:
        """Whether the run has trained, so that documents are used up."""
        return self.iteration > 0 or self.samples > 0


def restore(source: Source, loaded_at: LoadedAt) -> tuple[Source, list[str]]:
    """Bring the planner to where the loaded checkpoint was saved; returns the source with the choices that the run has
    made, and what there is to say of all this. SystemExit with one line if it cannot continue.
    """
    sizes, micro_batch_size = source.job.sizes, source.job.batches.micro_batch_size
    lines: list[str] = []
    if loaded_at.begun:
        lines = _continue(source, loaded_at)
        saved = saved_choices(checkpoint.loaded_state())
        if saved and source.config.batch_spread == "auto":
            source.planner.packer.batch_spread = saved["batch_spread"]
        config, choice_lines = keep(source.config, source.planner.packer, saved)
        source, lines = source.with_config(config), [*lines, *choice_lines]
    elif source.config.fresh_order:
        lines = ["a new document order begins: nothing has trained that --wlb-fresh-order could continue"]
    planner = source.planner
    for size in planner.schedule.from_now(planner.samples):
        if problem := misfit(
            size * micro_batch_size, sizes, micro_batch_size, by_plan=plan_decides(source.config)
        ):
            raise Refused(f"this run comes to global batches that cannot train: {problem}")
    return source, lines


def _continue(source: Source, loaded_at: LoadedAt) -> list[str]:
    state, planner, fresh = checkpoint.loaded_state(), source.planner, source.config.fresh_order
    micro_batch_size = source.job.batches.micro_batch_size  # windows, in which the planner counts
    micro_batches = loaded_at.samples // micro_batch_size
    if state is None:
        if not fresh:
            raise Refused(
                f"{loaded_at.checkpoint} holds no packing state, so the "
                "documents that it has trained are not known: add --wlb-fresh-order to begin the document order anew"
            )
        planner.begin_at(micro_batches)
        return [f"the document order begins at sample {loaded_at.samples:,}: the checkpoint has none"]
    unmoved = planner.stream.state()
    changed = _load(source, state, loaded_at)
    if changed and not fresh:
        raise Refused(f"{changed}; {CURE}")
    if not changed and fresh and (planner.began or saved_choices(state).get("fresh_order")):
        first_sample = planner.began * micro_batch_size
        return [f"the document order taken up at sample {first_sample:,} goes on: --wlb-fresh-order is done"]
    if not fresh:
        goes_on = (
            [f"the document order goes on at sample {loaded_at.samples:,}"]
            if loaded_at.iteration == 0
            else []
        )
        return [*goes_on, *_length_kept(source, unmoved)]
    began_at = [
        f"takes up the document order at sample {loaded_at.samples:,}: {changed or 'as --wlb-fresh-order asks'}"
    ]
    try:
        return [
            *began_at,
            *_lines_of(take_up(planner, micro_batches, state["planner"], next_epoch=not changed)),
        ]
    except (ValueError, *DAMAGE):
        planner.stream.load_state(unmoved)
        planner.begin_at(micro_batches)
        return [*began_at, "its state cannot be read: all corpora begin, and what waited is not known"]


def _length_kept(source: Source, before: dict[str, Any]) -> list[str]:
    """What there is to say if documents are split at a shorter length than this run allows, as before."""
    states = source.planner.stream.state(), before
    window, allowed_window = (state.get("fingerprint", {}).get("window", 0) for state in states)
    if window == allowed_window:
        return []
    return [
        f"documents are split at {window:,} tokens, as in the checkpoint; this run could train {allowed_window:,} whole"
    ]


def _load(source: Source, state: dict[str, Any], loaded_at: LoadedAt) -> str:
    """Load the state; what of it does not fit this run, empty if all does."""
    settings = _settings_of(source)
    try:
        changed = changes(state["settings"], settings, lambda name: f"--wlb-{name.replace('_', '-')}")
        if changed:
            return f"cannot resume with another cost model: {'; '.join(changed)}; set them as before"
        source.planner.load_state(state["planner"])
    except ValueError as error:
        return str(error)
    except DAMAGE:
        return "the packing state is damaged: resume from another checkpoint"
    micro_batch_size = source.job.batches.micro_batch_size
    samples = source.planner.samples * micro_batch_size
    if source.planner.samples == loaded_at.samples // micro_batch_size:
        return ""
    return (
        f"the packing state has trained {samples} samples, {loaded_at.checkpoint} {loaded_at.samples}: load the "
        "checkpoint as it was saved"
    )


def _lines_of(carried: Carried) -> list[str]:
    corpora = [
        (carried.going_on, "go on where they stood"),
        (carried.restarted, "begin an epoch"),
        (carried.begun, "are new"),
        (carried.gone, "are gone"),
    ]
    lines = ["corpora: " + ", ".join(f"{count} {fate}" for count, fate in corpora if count)]
    for pieces, fate in (
        (carried.kept, "train first"),
        (carried.lost, "of corpora that are gone do not train"),
    ):
        if pieces:
            tokens = sum(piece.tokens for piece in pieces)
            lines.append(f"{len(pieces):,} documents ({tokens:,} tokens) that waited {fate}")
    return lines


def _settings_of(source: Source) -> dict[str, Any]:
    """What plans depend on beside what the planner's own state checks."""
    return {"quadratic_at": source.config.quadratic_at, "document_cost": source.config.document_cost}
