"""The packing state inside Megatron's own checkpoints, and continuing the document order by it, or refusing with what
does not fit.

It travels in the arguments that every format saves. It belongs to the iteration trained, not to what was planned or
prefetched, nor to one whose gradients Megatron threw away. If these are not a number, its rerun state machine runs the
iteration again, saves the weights from before it, and exits. The state is the same on every rank and holds ids alone,
so that a run resumes at another data, tensor, context or pipeline parallel size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from wlb_megatron.errors import changes
from wlb_megatron.packing.carry import Carried, chosen, keep, saved_choices, take_up
from wlb_megatron.plugin.flags.training_job import misfit, plan_decides
from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.plugin.plans.source import Source
from wlb_megatron.refusals import Refused

ATTRIBUTE = "wlb_state"
_DIGEST = "digest"
MakeState = Callable[[], dict[str, Any]]

CURE = (
    "or add --wlb-fresh-order: documents that wait train first, known corpora continue where they were (with another "
    "--seed or --seq-length they begin an epoch), and new ones begin"
)

DAMAGE = (LookupError, TypeError, AttributeError, ArithmeticError, StopIteration)
"""What reading a damaged state raises, beside ValueError."""


@dataclass(slots=True)
class PackingStates:
    """loaded_state: the checkpoint's that Megatron has loaded; None if it has none, empty if it is damaged. text: the
    same as it was saved. make_next: makes the next checkpoint's, None before training. make_unapplied: makes that of
    the iteration whose gradients are there but not yet applied.
    """

    loaded_state: dict[str, Any] | None = None
    text: str | None = None
    make_next: MakeState | None = None
    make_unapplied: MakeState | None = None


def remember(source: Source, planner_state: MakeState, *, applied: bool = True) -> None:
    """Make the planner's state after an iteration part of the next checkpoint. applied: else not before Megatron
    has applied its gradients."""
    states, settings = part(PackingStates), _settings_of(source)
    choices = chosen(source.config, source.planner.packer)

    def state() -> dict[str, Any]:
        return {"settings": settings, "choices": choices, "planner": planner_state()}

    if applied:
        states.make_next = state
    else:
        states.make_unapplied = state


def _sealed(state: dict[str, Any]) -> str:
    """The state as text, with a digest of the rest in it."""
    return json.dumps({**state, _DIGEST: _digest(json.dumps(state))})


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _opened(saved: Any) -> dict[str, Any]:
    """The state of such a text; empty if it is damaged. States of releases before have no digest."""
    try:
        state = json.loads(saved)
        digest = state.pop(_DIGEST, None)
    except (TypeError, ValueError, AttributeError):
        return {}
    return state if digest is None or digest == _digest(json.dumps(state)) else {}


def wrap_generate_state_dict(original: Original, args: Any, *positional: Any, **kwargs: Any) -> Any:
    """generate_state_dict(args, ..) of arguments that hold the packing state: all that is saved goes through it."""
    states = part(PackingStates)
    text = states.text if states.make_next is None else _sealed(states.make_next())
    if text is not None:
        setattr(args, ATTRIBUTE, text)
    return original(args, *positional, **kwargs)


def note_applied() -> None:
    """At training_log, which Megatron calls on every rank between the optimizer's step and the next checkpoint."""
    states = part(PackingStates)
    if states.make_unapplied is not None:
        states.make_next, states.make_unapplied = states.make_unapplied, None


def wrap_load_base_checkpoint(
    original: Original, load_dir: Any, args: Any, *positional: Any, **kwargs: Any
) -> Any:
    """_load_base_checkpoint(load_dir, args, ..) that keeps the packing state of what it reads, also where Megatron
    saves again before anything trains (--ckpt-convert-format)."""
    result = original(load_dir, args, *positional, **kwargs)
    contents = result[0] if isinstance(result, tuple) else None
    if isinstance(contents, dict) and "args" in contents:
        states, saved = part(PackingStates), getattr(contents["args"], ATTRIBUTE, None)
        states.loaded_state = None if saved is None else _opened(saved)
        # Not into args, which Megatron prints after --use-checkpoint-args has read it.
        states.text = saved
    return result


def wrap_load_scheduler(original: Original, self: Any, state_dict: Any) -> Any:
    """OptimizerParamScheduler.load_state_dict that refuses another learning rate, or batch size, with one line.

    Megatron asserts that the rate goes on as before, and counts samples. So another --global-batch-size fails here,
    before plans are compared.
    """
    try:
        return original(self, state_dict)
    except AssertionError as error:
        raise Refused(
            f"the checkpoint's learning rate cannot go on ({error}): give --global-batch-size, "
            "--train-iters and the --lr flags as before, or add --override-opt-param-scheduler to take this run's "
            "(with another global batch also --wlb-fresh-order)"
        ) from None


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
        saved = saved_choices(part(PackingStates).loaded_state)
        if saved and source.config.batch_spread == "auto":
            source.planner.packer.batch_spread = saved["batch_spread"]
        config, choice_lines = keep(source.config, source.planner.packer, saved)
        source, lines = source.with_config(config), [*lines, *choice_lines]
    elif source.config.fresh_order:
        lines = ["a new document order begins: nothing has trained that --wlb-fresh-order could continue"]
    planner = source.planner
    for size in planner.schedule.from_now(planner.samples):
        by_plan = plan_decides(source.config)
        if problem := misfit(size * micro_batch_size, sizes, micro_batch_size, by_plan=by_plan):
            raise Refused(f"this run comes to global batches that cannot train: {problem}")
    return source, lines


def _continue(source: Source, loaded_at: LoadedAt) -> list[str]:
    state, planner, fresh = part(PackingStates).loaded_state, source.planner, source.config.fresh_order
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
        lines = _length_kept(source, unmoved)
        if loaded_at.iteration == 0:
            lines = [f"the document order goes on at sample {loaded_at.samples:,}", *lines]
        return lines
    why = changed or "as --wlb-fresh-order asks"
    began_at = f"takes up the document order at sample {loaded_at.samples:,}: {why}"
    try:
        carried = take_up(planner, micro_batches, state["planner"], next_epoch=not changed)
        return [began_at, *_lines_of(carried)]
    except (ValueError, *DAMAGE):
        planner.stream.load_state(unmoved)
        planner.begin_at(micro_batches)
        return [began_at, "its state cannot be read: all corpora begin, and what waited is not known"]


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
