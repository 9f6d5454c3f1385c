"""The --wlb-* flags, made from the fields of WlbConfig so that neither can drift from the other: of training, and as
flags of the commands, with what a command says to flags that only training has.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, fields, replace
from typing import Any

from wlb_megatron.config import RANKS, TOKENS, WlbConfig, whole
from wlb_megatron.errors import WlbError
from wlb_megatron.refusals import unsupported
from wlb_megatron.registry import PACKERS, Entry

PREFIX = "wlb_"


REMOVED = {
    "graph_seconds": "attention graphs are built for at most a minute before step 1",
    "balance_batches": "no packing balances fixed windows over several global batches",
    "release": "outlier queues release the documents that balance best",
    "solver_seconds": "dynamic groups are planned without a solver, which never won at real sizes",
}
"""Flags that this release takes for the last time, and says that they do nothing: name, and what happens instead."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's argument group to Megatron's parser (an `extra_args_provider`)."""
    group = parser.add_argument_group(
        title="workload-balanced packing and context parallelism",
        description="Flags of wlb_megatron. README.md tells when to change a default.",
    )
    for setting in fields(WlbConfig):
        options = flag_options(setting)
        if setting.name == "overlong":
            options["default"] = None
        group.add_argument(_flag(PREFIX + setting.name), dest=PREFIX + setting.name, **options)
    _add_removed(group)
    return parser


def _add_removed(parser: argparse._ActionsContainer, *spellings: str) -> None:
    for name in REMOVED:
        flags = [_flag(prefix + name) for prefix in (PREFIX, *spellings)]
        parser.add_argument(*flags, dest=PREFIX + name, help=argparse.SUPPRESS)


def flag_options(setting: Field[Any]) -> dict[str, Any]:
    """What argparse is told of a setting."""
    if setting.default is False:
        return {"help": setting.metadata["help"], "action": "store_true"}
    choices = setting.metadata.get("choices")
    default = "" if setting.default is None else f" (default: {setting.default})"
    return {
        "help": setting.metadata["help"] + default,
        "default": setting.default,
        "type": setting.metadata.get("type", str),
        "choices": Offered(choices) if isinstance(choices, dict) else choices,
    }


class Offered(dict[str, Entry]):
    """Entries of a registry. A flag takes all; its usage and messages, which iterate, name those that are offered."""

    def __iter__(self) -> Iterator[str]:
        return (name for name, entry in self.items() if not entry.instead)


def config_from_args(args: argparse.Namespace) -> WlbConfig:
    """The plugin's settings from the flags."""
    settings = {setting.name: getattr(args, PREFIX + setting.name) for setting in fields(WlbConfig)}
    if settings["overlong"] is None:
        del settings["overlong"]  # its default depends on the job
    return WlbConfig(**settings)


def removed_flags(args: argparse.Namespace) -> list[str]:
    """A line on each flag of REMOVED that is given."""
    return [
        f"{_flag(PREFIX + name)} does nothing from this release on, and will be refused from the next: leave it out "
        f"({why})"
        for name, why in REMOVED.items()
        if getattr(args, PREFIX + name, None) is not None
    ]


def take_instead(config: WlbConfig) -> tuple[WlbConfig, list[str]]:
    """The settings with what is taken in place of values that flags no longer offer, and a line on each."""
    lines = []
    for setting in fields(WlbConfig):
        choices = setting.metadata.get("choices")
        entry = choices.get(getattr(config, setting.name)) if isinstance(choices, dict) else None
        if entry is not None and entry.instead:
            flag = _flag(PREFIX + setting.name)
            lines.append(
                f"{flag} {getattr(config, setting.name)} is {entry.instead} from this release on, and will be refused "
                f"from the next: write {flag} {entry.instead}" + f" ({entry.note})" * bool(entry.note)
            )
            config = replace(config, **{setting.name: entry.instead})
    return config, lines


def name_flag(message: str, args: argparse.Namespace, prefix: str = "") -> str:
    """The message with the flag instead of a setting's name at its start.

    The settings have this prefix among `args`.
    """
    name, *words = message.split(" ", 1)
    name = prefix + name
    return " ".join([_flag(name), *words]) if hasattr(args, name) else message


def explain_unparsed(message: str, flags: Iterable[str]) -> str:
    """argparse's message, with the nearest of `flags` for each flag that it does not recognize."""
    marker = "unrecognized arguments: "
    if not message.startswith(marker):
        return message
    guesses = [guess(word.split("=")[0], flags, 0.8) for word in message.removeprefix(marker).split()]
    return f"{message} ({' '.join(filter(None, guesses))})" if any(guesses) else message


def guess(flag: str, flags: Iterable[str], likeness: float) -> str:
    """A question that names the nearest of `flags`, if one is at least so like (0 to 1)."""
    nearest = difflib.get_close_matches(flag, list(flags), n=1, cutoff=likeness) if flag[:2] == "--" else []
    return "".join(f"did you mean {near}?" for near in nearest)


NOT_HERE = tuple(setting.name for setting in fields(WlbConfig) if setting.metadata.get("training"))
"""Settings that matter in training alone."""


def renamed(text: str) -> str:
    """Flags as they are called here, where a message names them as in training."""
    text = re.sub(rf"--wlb-(?!{'|'.join(WHOLE_NAMES)})", "--", text)
    for name, here in _HERE:
        text = text.replace(name, here)
    return text


WHOLE_NAMES = ("recompute",)
"""Settings whose flags keep their --wlb- here, where the rest of the name is Megatron's."""


_HERE = (
    ("--seq-length", "--window"),
    ("--context-parallel-size", "--cp"),
    (" (with --sequence-parallel)", ""),  # the commands assume it, and the distributed optimizer
    (" or --use-distributed-optimizer", ""),
    ("--tensor-model-parallel-size", "--tp"),
    ("--pipeline-model-parallel-size", "--pp"),
    ("--num-virtual-stages-per-pipeline-rank / --num-layers-per-virtual-pipeline-stage", "--vpp"),
)


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Flags that say which documents, and how they are laid out over GPUs: by Megatron's names, or shorter ones."""
    parser.set_defaults(corpora=())
    add = parser.add_argument
    add(
        "--lengths",
        help="tokens of each document: a list such as 4,12, a .npy of integers, or a Megatron .idx (this or "
        "--data-path is required)",
    )
    add(
        "--data-path", nargs="*", metavar="WORD", help="prefixes of the corpora, with weights (default: none)"
    )
    add("--data-args-path", metavar="PATH", help="a file that holds --data-path (default: none)")
    add("--per-split-data-args-path", metavar="PATH", help="a JSON file of each part's (default: none)")
    for part in ("train", "valid", "test"):
        add(
            f"--{part}-data-path", nargs="*", metavar="WORD", help=f"prefixes of {part} alone (default: none)"
        )
    add("--split", help="shares of train, valid and test in --data-path (default: 969,30,1, as Megatron's)")
    add(
        "--seq-length",
        "--window",
        dest="window",
        type=whole(1, TOKENS),
        help="tokens of a window (required)",
    )
    add(
        "--micro-batches",
        type=whole(1),
        help="windows of a data-parallel rank in an iteration: --global-batch-size over --dp (default: 1)",
    )
    add(
        "--global-batch-size",
        type=whole(1),
        help="windows of an iteration over all data-parallel ranks; instead of --micro-batches (default: none)",
    )
    add(
        "--micro-batch-size",
        type=whole(1),
        default=1,
        help="windows of a micro-batch (default: 1)",
    )
    add("--world-size", type=whole(1, RANKS), help="GPUs of the job, from which --dp follows (default: none)")
    add("--dp", type=whole(1, RANKS), help="data-parallel size (default: 1, or what --world-size says)")
    add_sizes(parser)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Context and tensor parallelism, of commands that take a launch command."""
    parser.set_defaults(launched=False, notes=())
    _size(parser, "--context-parallel-size", "--cp", "context-parallel size")
    help_text = "tensor-parallel size; a micro-batch is padded to a multiple of --cp x --tp tokens"
    _size(parser, "--tensor-model-parallel-size", "--tp", help_text)


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Flags of the pipeline."""
    _size(parser, "--pipeline-model-parallel-size", "--pp", "pipeline-parallel size")
    help_text = "model chunks of a pipeline stage, for the interleaved schedule"
    _size(parser, "--num-virtual-stages-per-pipeline-rank", "--vpp", help_text)


def _size(parser: argparse.ArgumentParser, flag: str, alias: str, text: str) -> None:
    kind = whole(1, RANKS)
    parser.add_argument(flag, alias, dest=alias[2:], default=1, type=kind, help=f"{text} (default: 1)")


def complete_layout(args: argparse.Namespace) -> None:
    """Fills in the data-parallel size and the windows of a rank, as the flags give them. WlbError where they do not fit
    together."""
    if args.window is None:
        raise UsageError("--seq-length (or --window) is required: tokens of a window")
    ranks = args.tp * args.cp * args.pp
    if args.world_size is not None:
        if args.world_size % ranks:
            raise UsageError(
                f"the number of GPUs, {args.world_size}, is not a multiple of --tp {args.tp} x --cp {args.cp} x --pp "
                f"{args.pp}: change one"
            )
        dp = args.world_size // ranks
        if args.dp not in (None, dp):
            raise UsageError(
                f"--dp {args.dp} is not what --world-size {args.world_size} says ({dp}): drop one"
            )
        args.dp = dp
    elif args.dp is None and args.launched:
        raise UsageError(
            "the launch command does not say how many GPUs it takes: give --world-size before --"
        )
    args.dp = args.dp or 1
    if args.micro_batches is not None and args.global_batch_size is not None:
        raise UsageError(
            "--micro-batches and --global-batch-size say the same: give one (the first is of a data-parallel rank)"
        )
    if args.global_batch_size is not None:
        if args.global_batch_size % args.dp:
            raise UsageError(
                f"--global-batch-size {args.global_batch_size} is not a multiple of the data-parallel size {args.dp}"
            )
        args.micro_batches = args.global_batch_size // args.dp
    args.micro_batches = args.micro_batches or args.micro_batch_size
    if args.micro_batches % args.micro_batch_size:
        raise UsageError(
            f"{args.micro_batches} windows of a data-parallel rank are not a multiple of --micro-batch-size "
            f"{args.micro_batch_size}: change --global-batch-size, or one of the two"
        )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of WlbConfig, named as in training but without --wlb."""
    for setting in fields(WlbConfig):
        if setting.name not in NOT_HERE:
            add_setting(parser, setting.name)
    _add_removed(parser, "")


def add_setting(parser: argparse.ArgumentParser, name: str) -> None:
    """The flag of one field of WlbConfig."""
    setting = next(setting for setting in fields(WlbConfig) if setting.name == name)
    options = flag_options(setting)
    options["help"] = renamed(options["help"])
    flags = [_flag(PREFIX + name), *([] if name in WHOLE_NAMES else [_flag(name)])]
    parser.add_argument(*flags, dest=name, **options)


def settings(args: argparse.Namespace) -> WlbConfig:
    """The settings as given; args.notes gets a line on a value that is no longer offered. WlbError for what changes
    nothing, and for a launch command that training refuses."""
    names = [setting.name for setting in fields(WlbConfig) if setting.name not in NOT_HERE]
    config, lines = take_instead(WlbConfig(**{name: getattr(args, name) for name in names}))
    lines += map(renamed, removed_flags(args))
    args.notes = (*getattr(args, "notes", ()), *(f"note: {line}" for line in lines))
    if not getattr(args, "launched", False):  # training takes what changes nothing
        refuse_idle(config)
    elif lines := unsupported(args, config):
        raise UsageError(lines[0])
    return config


def refuse_idle(config: WlbConfig) -> None:
    """WlbError for a setting that the others leave without effect."""
    plain = WlbConfig()
    for name, needs in idle(config).items():
        value = getattr(config, name)
        if value not in (getattr(plain, name), "1"):
            raise WlbError(
                f"{_flag(name)} {value} changes nothing without {needs}: add that, or leave it out"
            )


def idle(config: WlbConfig) -> dict[str, str]:
    """Names of settings that the others leave without effect, and what they need."""
    used = PACKERS[config.packing].settings
    needs = {
        setting: f"--packing {name}"
        for name, entry in PACKERS.items()
        for setting in entry.settings
        if setting not in used
    }
    if config.cp_mode != "fixed":
        needs["micro_batches_per_window"] = "--cp-mode fixed"
    return needs


class UsageError(WlbError):
    """About the command line itself. It names flags as the user wrote them."""


def explain_unknown(unknown_words: Sequence[str], prog: str) -> str:
    """A line for the first flag that only training has, else for all of `unknown_words`, which the command did not
    understand. prog: how it is called."""
    for part in unknown_words:
        flag = part.split("=")[0]
        if flag.replace("--wlb-", "--", 1).removeprefix("--").replace("-", "_") in NOT_HERE:
            return f"{flag} only affects training: leave it out here"
    return f"unrecognized arguments: {' '.join(unknown_words)} (see {prog} --help)"


def flags_of(config: WlbConfig) -> str:
    """The flags to copy to the training command, without those that are defaults."""
    plain, flags = WlbConfig(), []
    for field in fields(WlbConfig):
        value = getattr(config, field.name)
        if value != getattr(plain, field.name) and _matters(field.name, config):
            flag = _flag(PREFIX + field.name)
            flags.append(flag if value is True else f"{flag} {value}")
    return " ".join(flags)


def _matters(name: str, config: WlbConfig) -> bool:
    """Whether the setting does anything with this packing."""
    of_varlen = ("micro_batches_per_window", "chunks")
    return name not in {"gpu_memory", *idle(config)} and (not config.fixed_windows or name not in of_varlen)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
