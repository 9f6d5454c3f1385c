"""Megatron's flags, taken over where they are parsed and validated: ours are added, what is not handled is refused.
And what pretrain() is handed: the plugin's dataset provider, forward step and layer spec.

The flags are Megatron's own namespace here, since refusals look at any of them and some are set. All that comes after
gets a TrainingJob.
"""

from __future__ import annotations

import errno
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wlb_megatron.arguments import (
    PREFIX,
    add_arguments,
    config_from_args,
    explain_unparsed,
    name_flag,
    removed_flags,
    take_instead,
)
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.plugin import script_functions
from wlb_megatron.plugin.flags import versions
from wlb_megatron.plugin.flags.limits import complete, fit_to_memory
from wlb_megatron.plugin.flags.refusal_printing import checked, refuse, say
from wlb_megatron.plugin.flags.training_job import TrainingJob, misfit, plan_decides
from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.plugin.megatron_trial import try_transformer_engine
from wlb_megatron.plugin.model.delta_nets import try_delta_nets
from wlb_megatron.plugin.plans.source import Source, open_sources
from wlb_megatron.plugin.sft.indexed import with_targets
from wlb_megatron.plugin.step.multi_token import refuse_other_form
from wlb_megatron.plugin.stores import with_others_lines
from wlb_megatron.refusals import DryRunPassed, Refused, RefusedHere, refuse_unsupported


@dataclass(slots=True)
class Start:
    """The job that the plugin runs, None before its flags are checked, and the planners over its corpus. saves: the
    folder of --save."""

    job: TrainingJob | None = None
    sources: dict[str, Source] = field(default_factory=dict)
    saves: str | None = None


def is_off() -> bool:
    """Whether --wlb-off is given, also before Megatron parses it."""
    return "--wlb-off" in sys.argv


def make_printable(parser: Any) -> None:
    """Mend the flags whose help argparse cannot print: in 0.19.2 one has a bare %, and --help ended in a stack."""
    for action in parser._actions:
        try:
            parser._get_formatter()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


def wrap_parse_args(
    original: Original, extra_args_provider: Any = None, ignore_unknown_args: bool = False
) -> Any:
    """parse_args that knows the --wlb-* flags, beside the script's own extra ones."""

    def provider(parser: Any) -> Any:
        parser = add_arguments(extra_args_provider(parser) if extra_args_provider else parser)
        if {"-h", "--help"} & {*sys.argv[1:]}:
            make_printable(parser)
        if not is_off():
            # argparse prints 300 lines of usage on every rank, and then the reason
            parser.error = lambda message: refuse(explain_unparsed(message, parser._option_string_actions))
        return parser

    args = original(provider, ignore_unknown_args)
    if not hasattr(args, "wlb_off"):
        _only_if_off(args)
    return args


def _only_if_off(args: Any) -> None:
    """Arguments without the plugin's are those of a --yaml-cfg, which stands for all flags and has its own checks."""
    args.wlb_off = is_off()
    if not args.wlb_off:
        refuse(
            "--yaml-cfg: Megatron then ignores every flag, --wlb-* too, and checks settings elsewhere; give the "
            "settings as flags."
        )


def wrap_validate_args(original: Original, args: Any, defaults: dict[str, Any] | None = None) -> Any:
    """validate_args that then refuses what is not handled, opens the corpus, and sets what the plugin needs."""
    if not args.wlb_off and (problem := too_small(args)):
        refuse(problem)
    world = os.environ.get("WORLD_SIZE")
    if args.wlb_dry_run and (world is None or args.wlb_world_size not in (None, int(world))):
        refuse("wlb_megatron refuses --wlb-dry-run here: start the script by python -m wlb_megatron.launch")
    if not args.wlb_off and args.wlb_train_epochs is not None:
        if by_step := [name for name in ("lr_warmup_iters", "lr_decay_iters") if getattr(args, name, None)]:
            flag = f"--{by_step[0].replace('_', '-')}"
            refuse(
                f"wlb_megatron refuses --wlb-train-epochs with {flag}: it sets --train-samples; give "
                f"{flag.replace('iters', 'samples')}, or a share of the run by --lr-warmup-fraction."
            )
        if args.train_iters or args.train_samples:
            given_flag = "--train-iters" if args.train_iters else "--train-samples"
            refuse(f"wlb_megatron refuses --wlb-train-epochs with {given_flag}: give one of them.")
        args.train_samples = 1  # until the corpus has been read; Megatron asks for a number here
    try:
        result = original(args, defaults or {})
    except (AssertionError, ValueError, RuntimeError) as error:
        # Megatron raises these for flags that do not fit together: its text is the message, without the stack.
        raised = traceback.extract_tb(error.__traceback__)[-1]
        if args.wlb_off or "megatron" not in Path(raised.filename).parts:
            raise
        message = " ".join(str(error).split()) or raised.line
        refuse(f"Megatron refuses these flags: {message}")
    if not args.wlb_off:
        checked(lambda: _take_over(args))
    elif _lacks_context_parallelism(args):
        refuse(
            "--wlb-off at --context-parallel-size above 1: Megatron's own attention then needs Transformer Engine; "
            "install it, or compare with --wlb-packing original --wlb-sharding per-sequence"
        )
    if args.eval_interval is None:
        args.eval_interval = 1000  # Megatron divides by it, though nothing is evaluated, also with --wlb-off
    return result


def _take_over(args: Any) -> None:
    job, sources = _open(args)
    if job.evaluation.full:  # Megatron evaluates where eval_iters is above 0; see iterators.wrap_evaluate
        args.eval_iters, args.full_validation = job.evaluation.iterations, args.multiple_validation_sets
    start = part(Start)
    start.job, start.sources, start.saves = job, sources, args.save
    if (train := sources.get("train")) is not None and train.train_samples is not None:
        args.train_samples = train.train_samples
    _set_what_plans_need(args, job)
    if args.wlb_dry_run:
        raise DryRunPassed(args)


ASSUMED_GIB = 80.0
"""A GPU's memory in a dry run, if no flag gives it."""


def _open(args: Any) -> tuple[TrainingJob, dict[str, Source]]:
    """Refuse what is not handled, and open the corpus."""
    dry = args.wlb_dry_run  # on any machine: what only GPUs can tell is left out
    if not dry:
        versions.check_transformer_engine(args.transformer_impl)
    try:
        from_flags, lines = take_instead(config_from_args(args))
        for line in (*lines, *removed_flags(args)):
            say(f"note: {line}")
        if dry and from_flags.gpu_memory is None:
            from_flags = replace(from_flags, gpu_memory=ASSUMED_GIB)
        refuse_unsupported(args, from_flags)
        _refuse_unknown_spec(args.spec)
        job = TrainingJob.of(args, from_flags)
        job = job.with_config(complete(job))
        refuse_other_form(job.model.depths)
        _refuse_misfits(job)
        check_outputs(job.config)
        if not dry:
            try_transformer_engine(job)
            try_delta_nets(job)
            job.kernels()
        job = with_targets(job, say)
        job = job.with_config(fit_to_memory(job))
        return job, open_sources(job)
    except ValueError as error:  # WlbErrors, and settings that do not fit together
        raise RefusedHere(name_flag(str(error), args, PREFIX)) from None


def _refuse_unknown_spec(spec: list[str] | None) -> None:
    """Megatron logs that it cannot import a --spec, and a HybridModel then trains with the default layers."""
    from megatron.core.transformer.spec_utils import import_module

    try:
        # A script's own model provider may handle "local", as Megatron's help says of this flag.
        found = spec in (None, ["local"]) or import_module(spec) is not None
    except (ImportError, KeyError, ValueError):
        found = False
    if not found:
        raise Refused(
            f"--spec {' '.join(spec or ())}: no such module or attribute; see its name and PYTHONPATH"
        )


def _lacks_context_parallelism(args: Any) -> bool:
    """Whether stock Megatron would end in a traceback: of its attention classes only Transformer Engine's takes context
    parallelism. A --spec may bring another attention."""
    missing = args.transformer_impl == "local" or importlib.util.find_spec("transformer_engine") is None
    return args.context_parallel_size > 1 and args.spec is None and missing


def _set_what_plans_need(args: Any, job: TrainingJob) -> None:
    if (steps := job.batches.ramp) is not None:
        why = "Megatron parses --rampup-batch-size but ignores it"
        _set(args, "step_batch_size_schedule", steps, why)
    why = "micro-batches differ in tokens, so the loss is summed per token"
    _set(args, "calculate_per_token_loss", True, why)
    _set(args, "dataloader_type", "external", "the plugin's sampler orders the data")
    if job.fine_tuning is not None:
        args.sft = False  # by it Megatron's evaluation divides by micro-batches, not by targets
    comm_types = getattr(args, "cp_comm_type", None) or ["p2p"]
    if job.sizes.context > 1 and {*([comm_types] if isinstance(comm_types, str) else comm_types)} != {"p2p"}:
        say("ignores --cp-comm-type: the plan decides which keys ranks exchange")
    if job.sizes.context > 1 and job.model.implementation == "local":
        args.cp_comm_type = ["all_gather"]  # the only kind that Megatron's dev branch takes with plain torch
    # Megatron clears this in validate_args; shapes then come from the plan, not from an exchange.
    # (allgather refuses it where the model is built; see spec.prepare_model.)
    args.variable_seq_lengths = not args.num_experts or args.moe_token_dispatcher_type != "allgather"
    experts = job.model.shape.experts
    if args.num_experts is None:  # asked of every model with variable lengths; no experts here
        args.moe_token_dispatcher_type = "alltoall"
    elif experts is not None and not experts.one_kernel and KEPT_CHOICES not in os.environ:
        os.environ[KEPT_CHOICES] = "200000"
        say(f"sets {KEPT_CHOICES}=200000: experts' matrix products differ in size between micro-batches")


KEPT_CHOICES = "CUBLASLT_HEURISTICS_CACHE_CAPACITY"
"""For how many sizes cuBLAS remembers the best kernel, 8192 by default. It reads this at its first product. An expert's
number of tokens is another in each micro-batch, and choosing again takes the host 0.1 ms an expert and layer, unless
one kernel multiplies all experts (docs/measured.md, Steps with experts). 200,000 sizes take 86 MiB of a rank's host
memory."""


def _refuse_misfits(job: TrainingJob) -> None:
    """Refuse a window that does not divide, and the sizes of batches that every run comes to.

    Sizes on the way there are looked at once the model has loaded, when it is known where the run goes on.
    """
    if problem := job.window_misfit():
        raise Refused(f"--seq-length: {problem}")
    batches = job.batches
    if problem := misfit(
        batches.schedule.largest, job.sizes, batches.micro_batch_size, by_plan=plan_decides(job.config)
    ):
        flag = "--step-batch-size-schedule" if batches.stepped else "--global-batch-size"
        raise Refused(f"{flag}: {problem}")
    by_plan = plan_decides(job.config, evaluation=True)
    if job.evaluation.iterations and (
        problem := misfit(batches.evaluated, job.sizes, batches.evaluated_micro_batch_size, by_plan=by_plan)
    ):
        raise Refused(f"--eval-global-batch-size: {problem}")


def _set(args: Any, name: str, value: Any, why: str) -> None:
    if getattr(args, name) != value:
        setattr(args, name, value)
        say(f"sets --{name.replace('_', '-')} {value}: {why}")


def check_outputs(config: WlbConfig) -> None:
    """Refuse a --wlb-log or --wlb-trace that the last rank, which writes them, cannot write. Leaves no file behind.

    A dry run checks them on its machine."""
    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    if not last and not config.dry_run:
        return
    for flag, name, probe in (("--wlb-log", config.log, _appended), ("--wlb-trace", config.trace, _replaced)):
        try:
            if name is not None:
                probe(Path(name))
        except OSError as error:
            raise RefusedHere(
                f"{flag} {name}: the last rank cannot write it ({error.strerror}); give a path "
                "in a folder that it can write to"
            ) from None


def _appended(path: Path) -> None:
    if not path.exists():
        return _replaced(path)
    with path.open("ab"):
        pass


def _replaced(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    probe = path.with_name(f".{path.name}.{os.getpid()}.probe")
    probe.open("xb").close()
    probe.unlink()


LEAST = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "seq_length": 1,
    "log_interval": 1,
    "eval_interval": 1,
    "eval_iters": 0,
    "train_iters": 0,
    "num_workers": 0,
    "seed": 0,
}
"""The least that each of Megatron's numbers may be. Megatron divides by them, or hands them on, without a look."""


def too_small(args: Any) -> str | None:
    """What to refuse of Megatron's arguments before they are validated, a line each; None if nothing is wrong."""
    lines = [
        f"--{name.replace('_', '-')} {value}: give {minimum} or more."
        for name, minimum in LEAST.items()
        if (value := getattr(args, name, None)) is not None and value < minimum
    ]
    return "\n".join(lines) or None


def wrap_pretrain(original: Original, *args: Any, **kwargs: Any) -> Any:
    """pretrain() over the plugin's dataset provider, forward step and layer spec.

    From 0.19 the model is described by a configuration, which gets the layer spec; before, or when the script gives a
    model_provider, what that builds does.
    """
    from wlb_megatron.plugin.model.spec import install_spec, with_plan_attention
    from wlb_megatron.plugin.plans.provider import make_provider
    from wlb_megatron.plugin.step.forward_step import forward_step

    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    start = part(Start)
    if (job := start.job) is None:
        refuse("flags were parsed before the plugin was there: call enable() before the script parses them")
    checked(
        lambda: script_functions.settle(
            arguments["forward_step_func"],
            arguments["train_valid_test_dataset_provider"],
            replace=job.given.replace_script_functions,
            fp16=job.model.dtype == "float16",
        )
    )
    arguments["train_valid_test_dataset_provider"] = make_provider(start.sources)
    arguments["forward_step_func"] = forward_step
    if (theirs := arguments.get("model_provider")) is not None:
        arguments["model_provider"] = with_plan_attention(theirs, job.given)
    else:
        checked(lambda: install_spec(arguments["cfg_container"].model, job.given))
    # A checkpoint, or the model's layers, may be refused.
    return checked(lambda: with_others_lines(lambda: _train(original, arguments, start.saves)))


def _train(original: Callable[..., Any], arguments: dict[str, Any], saves: str | None) -> Any:
    try:
        return original(**arguments)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        reason = name_full_disk(error, saves) if saves else None
        if reason is None:
            raise
        raise WlbError(reason) from error


def wrap_compile_helpers(original: Original) -> None:
    """compile_helpers that runs make only where Megatron's own datasets may be built (--wlb-off) and helpers are not:
    PyPI's wheel brings them built, but no Makefile."""
    if is_off() and importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        original()


FULL = "No space left on device"
_TEXTS = (FULL, "Disk quota exceeded")
_ALMOST = 1 << 20
"""Bytes left of a disk that counts as full. Megatron's writers say only that a worker failed."""


def name_full_disk(error: BaseException, folder: str) -> str | None:
    """One line if a checkpoint cannot be saved because its disk is full, which Megatron's errors do not name.

    folder: that of --save. None if the error does not say that nothing more fits, and there is room.
    """
    texts = [text for text in _TEXTS if any(text in str(cause) for cause in _causes(error))]
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        room = os.statvfs(place)
    except OSError:
        return None
    free_bytes = room.f_bavail * room.f_frsize
    if not texts and free_bytes > _ALMOST:
        return None
    return (
        f"cannot save a checkpoint in {folder}: {texts[0] if texts else FULL} ({free_bytes / 1e9:,.1f} of "
        f"{room.f_blocks * room.f_frsize / 1e9:,.1f} GB left). Make room, delete a folder without a finished save, and "
        "start again: the run goes on from its last checkpoint"
    )


def _causes(error: BaseException) -> list[BaseException]:
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes
