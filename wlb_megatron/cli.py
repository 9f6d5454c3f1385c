"""The `wlb-megatron` command: look at plans (inspect), predict and simulate what they bring. Needs numpy alone.

A launch command of training is read as it is pasted: torchrun's arguments, the script, and Megatron's flags.
"""

from __future__ import annotations

import argparse
import copy
import errno
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from wlb_megatron import __version__
from wlb_megatron.analyze.analyze_command import add_analyze, run_analyze
from wlb_megatron.analyze.output import as_json, print_analysis
from wlb_megatron.arguments import (
    UsageError,
    add_layout,
    add_pipeline,
    add_settings,
    complete_layout,
    explain_unknown,
    guess,
    name_flag,
    renamed,
    settings,
)
from wlb_megatron.config import WlbConfig, whole
from wlb_megatron.doctor.doctor_command import add_doctor
from wlb_megatron.documents.corpus import Lengths
from wlb_megatron.documents.lengths import read_lengths
from wlb_megatron.errors import PREFIX, WlbError
from wlb_megatron.inspect_plans import inspect_plans
from wlb_megatron.plugin.flags.data_paths import DataPaths, training_corpora
from wlb_megatron.plugin.sft.indexed import add_sft_index
from wlb_megatron.profiler.profile_command import add_profile
from wlb_megatron.report.terminal import print_table
from wlb_megatron.simulator.job import Job
from wlb_megatron.simulator.job_flags import add_job, add_recompute, read_job
from wlb_megatron.simulator.model_flags import PRESETS, add_model, check_vpp
from wlb_megatron.whole_files import write_whole
from wlb_megatron.workload.model import Layout, one_kernel

MOVED = {
    "patch": "patch has moved: run patches/apply.sh from a clone, with the same flags",
    "watch": "watch is gone: TensorBoard and Weights & Biases draw its figures (wlb/...), docs/log.md reads the file",
}
"""Commands of earlier releases."""

_NAMES = """
context-parallel-size cpu-offloading-num-layers data-args-path data-path expert-model-parallel-size
expert-tensor-parallel-size ffn-hidden-size fine-grained-activation-offloading global-batch-size group-query-attention
hidden-dropout hidden-size hybrid-layer-pattern kv-channels kv-lora-rank micro-batch-size moe-ffn-hidden-size
moe-grouped-gemm moe-layer-freq moe-permute-fusion moe-router-load-balancing-type moe-router-topk
moe-shared-expert-intermediate-size mtp-num-layers linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads
linear-num-value-heads linear-value-head-dim multi-latent-attention no-gradient-accumulation-fusion num-attention-heads
num-experts num-layers num-layers-per-virtual-pipeline-stage num-query-groups num-virtual-stages-per-pipeline-rank
overlap-grad-reduce overlap-param-gather per-split-data-args-path pipeline-model-parallel-size q-lora-rank qk-head-dim
qk-layernorm qk-pos-emb-head-dim recompute-activations recompute-granularity recompute-method recompute-num-layers seed
seq-length sequence-parallel split swiglu tensor-model-parallel-size test-data-path train-data-path train-iters
train-samples untie-embeddings-and-output-weights use-distributed-optimizer use-megatron-fsdp use-torch-fsdp2 v-head-dim
valid-data-path vocab-size
"""
MEGATRON = frozenset(f"--{name}" for name in _NAMES.split())
"""Flags of Megatron's that the commands read. Flags with --wlb- are read as well."""

PASSED_OVER = {
    "--fp8-format": "times are of bf16",
    "--fp4-format": "times are of bf16",
    "--window-size": "attention is counted over whole documents",
    "--rampup-batch-size": "batches of the full size are simulated",
    "--step-batch-size-schedule": "batches of --global-batch-size are simulated",
    "--pipeline-model-parallel-layout": "layers are spread evenly over stages",
    "--decoder-first-pipeline-num-layers": "layers are spread evenly over stages",
    "--decoder-last-pipeline-num-layers": "layers are spread evenly over stages",
    "--account-for-embedding-in-pipeline-split": "layers are spread evenly over stages",
    "--account-for-loss-in-pipeline-split": "layers are spread evenly over stages",
    "--microbatch-group-size-per-virtual-pipeline-stage": "groups are as large as the pipeline",
    "--recompute-modules": "selective recomputation is of core attention alone",
    "--optimizer-cpu-offload": "the optimizer is counted on the GPU",
    "--use-precision-aware-optimizer": "the optimizer's state is counted in fp32",
    "--grad-reduce-in-bf16": "gradients are reduced in fp32; give --gradient-bytes 2",
    "--tp-comm-overlap": "give --tp-exposed, the share of tensor parallelism's communication that is not hidden",
    "--experimental-attention-variant": "every layer is counted as one of attention; give G's and *'s as a pattern",
    "--hybrid-layer-pattern": "one layer of attention with an MLP or experts is measured",
    "--mock-data": "give --lengths",
}
"""Megatron's flags that change a prediction and are not read, and what is assumed instead."""


class CommandParser(argparse.ArgumentParser):
    def parse_args(  # type: ignore[override]
        self,
        arguments: Sequence[str],
        args: argparse.Namespace,
        commands: Mapping[str, argparse.ArgumentParser],
    ) -> None:
        """Fill in args. What follows -- is a launch command of training; flags before it count more, a known model's
        less. UsageError for flags that the command does not take."""
        if arguments and arguments[0] in MOVED.keys() - commands.keys():
            raise UsageError(MOVED[arguments[0]])
        own_arguments = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
        _, unknown = self.parse_known_args(own_arguments, args)
        command = commands[args.command]
        if unknown:
            raise UsageError(explain_unknown(unknown, command.prog))
        launched = "--" in arguments
        if launched and not hasattr(args, "launched"):
            raise UsageError(f"{args.command} takes no launch command: leave out what follows --")
        launch = read_launch(arguments[len(own_arguments) + 1 :])
        preset = PRESETS.get(getattr(args, "model", None) or "")
        words = [*(preset or "").split(), *launch.flags]
        passed_over: list[str] = []
        if words:
            launch_settings = argparse.Namespace(command=args.command)
            _, passed_over = launch_parser(command).parse_known_args(words, launch_settings)
            command.parse_known_args(own_arguments[1:], launch_settings)
            vars(args).update(vars(launch_settings))
        if hasattr(args, "launched"):
            args.launched, args.notes = launched, tuple(notes_of(passed_over))
        if hasattr(args, "world_size"):
            args.world_size = args.world_size or launch.world
        if hasattr(args, "moe_grouped_gemm"):
            args.one_kernel = one_kernel(args.moe_grouped_gemm, {**os.environ, **launch.environment})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, as `run` does."""
    parser = CommandParser(
        prog="wlb-megatron",
        description="Plan, predict and check workload-balanced packing for Megatron-LM. Only `profile` needs a GPU.",
    )
    parser.add_argument("--version", action="version", version=f"wlb_megatron {__version__}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="inspect | analyze | profile | sft-index | doctor",
    )
    _add_inspect(commands.add_parser("inspect", help="show the plans of documents of given lengths"))
    analyzer = commands.add_parser("analyze", help="predict what balancing gains on your documents")
    add_analyze(analyzer)
    analyzer.set_defaults(run=_analyze)
    add_profile(commands.add_parser("profile", help="measure a model's costs on this GPU"))
    add_sft_index(commands.add_parser("sft-index", help="tokenize conversations for --sft"))
    add_doctor(commands.add_parser("doctor", help="check what is installed here, and print what to fix"))
    return run(parser, commands.choices, sys.argv[1:] if argv is None else argv)


def run(
    parser: CommandParser, commands: Mapping[str, argparse.ArgumentParser], arguments: Sequence[str]
) -> int:
    """Returns the exit code: 0; 2 with one line on stderr for what the user can fix; 130 after Ctrl-C.

    Args:
        parser: It takes a command, and `commands` the flags of each.
        arguments: The command and its flags.
    """
    args = argparse.Namespace()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # `analyze | tee` shows each part as it is known
    try:
        parser.parse_args(arguments, args, commands)
        args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # else what cannot be written is met at exit, where nobody handles it
    except WlbError as error:
        message = name_flag(str(error), args)
        asis = isinstance(error, UsageError) or getattr(args, "command", "") == "doctor"
        message = message if asis else renamed(message)
        print(f"{PREFIX} {message}", file=sys.stderr)
        return 2
    except MemoryError:
        print(f"{PREFIX} out of memory: give fewer documents or smaller sizes", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PREFIX} interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has read enough
        _forget_stdout()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
        _forget_stdout()
        print(f"{PREFIX} cannot write the output: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _forget_stdout() -> None:
    """Discards what stdout still buffers."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Launch(NamedTuple):
    """The flags of the training script. world: GPUs, None where the command does not say. environment: variables that
    the command sets (NAME=VALUE, also after env)."""

    flags: tuple[str, ...]
    world: int | None = None
    environment: Mapping[str, str] = {}


def read_launch(words: Sequence[str]) -> Launch:
    """Splits a command behind the script, or the module that is the script.

    ["torchrun", "--nproc-per-node", "8", "-m", "wlb_megatron.launch", "pretrain_gpt.py", "--num-layers", "2"]: 8 GPUs,
    and the last two words. Words that begin with a flag are Megatron's flags alone.
    """
    if not words or words[0].startswith("-"):
        return Launch(tuple(words))
    ends = [place + 1 for place, word in enumerate(words) if word.endswith(".py")]
    ends += [
        place + 2
        for place, (flag, module) in enumerate(pairwise(words))
        if flag == "-m" and not module.startswith("torch.")
    ]
    if not ends:
        raise WlbError(
            f"no training script in {' '.join(words[:4])!r}: paste the whole command, or only its flags, after --"
        )
    starter, flags = words[: ends[0]], words[ends[0] :]
    world = None
    if any(
        word.rsplit("/", 1)[-1] == "torchrun" or word.startswith("torch.distributed.") for word in starter
    ):
        sizes = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        sizes.add_argument("--nnodes", type=int, default=1)
        sizes.add_argument("--nproc-per-node", "--nproc_per_node", type=int, default=1)
        with suppress(argparse.ArgumentError):  # "gpu", "auto", "1:4", a shell's variable
            given, _ = sizes.parse_known_args(starter)
            world = given.nnodes * given.nproc_per_node
    sets = dict(word.split("=", 1) for word in starter if "=" in word and not word.startswith("-"))
    return Launch(tuple(flags), world, sets)


def launch_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser of the command's options by their names in training alone: there, --profile has another meaning. Options
    that describe a job, but only a launch command can give here, are the command's default `of_launch`."""
    training = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    training.error = parser.error  # type: ignore[method-assign]
    dests = {action.dest for action in parser._actions}
    of_launch = [action for action in parser.get_default("of_launch") or () if action.dest not in dests]
    for action in (*parser._actions, *of_launch):
        names = [name for name in action.option_strings if name in MEGATRON or name.startswith("--wlb-")]
        if names:
            action = copy.copy(action)
            action.option_strings = names
            training._add_action(action)
    return training


def notes_of(unknown: Sequence[str]) -> list[str]:
    """A line for each flag that matters to a prediction and is not read, or is almost one that is read.

    unknown: the words that the parser did not take.
    """
    settings = {f"--wlb-{setting.name.replace('_', '-')}" for setting in fields(WlbConfig)}
    reasons = {}
    for flag in (word.split("=")[0] for word in unknown):
        nearest = "" if flag in MEGATRON | settings else guess(flag, sorted(MEGATRON | settings), 0.9)
        # Without --, for which a message would have the commands' own name.
        reasons[flag] = PASSED_OVER.get(flag) or nearest.replace(" --", " ")
        if flag.startswith("--wlb-") and flag not in settings and not nearest:
            reasons[flag] = "wlb_megatron has no such flag in this release"
    return [f"note: {flag} is not predicted: {reason}" for flag, reason in reasons.items() if reason]


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints the plans of one pass over the documents in the given order. A piece or segment is id[start, end): "
        "tokens start to end of the document at that position in --lengths. Padding has id -1."
    )
    add_layout(parser)
    add_settings(parser)
    add_pipeline(parser)
    _add_inspected_job(parser)
    parser.add_argument("--iterations", type=whole(1), help="iterations to show (default: all)")
    parser.add_argument(
        "--json",
        metavar="PATH",
        help="write the plans as JSON to this file, or to stdout for -, instead of a table",
    )
    parser.set_defaults(run=_inspect)


_OF_MEMORY = ("recompute", "memory_margin", "gpu_memory")
"""Settings that change nothing without a model."""


def _add_inspected_job(parser: argparse.ArgumentParser) -> None:
    """The model's flags; what else describes a job stays at its default, unless a launch command gives it."""
    settings = [action for action in parser._actions if action.dest in _OF_MEMORY]
    before = len(parser._actions)
    add_recompute(parser)
    add_model(parser)
    described = [*settings, *parser._actions[before:]]
    whole_job = argparse.ArgumentParser()
    add_job(whole_job)
    destinations = {action.dest for action in parser._actions}
    defaults = vars(whole_job.parse_args([])) | {"seed": -1, "warm_up": 0}
    parser.set_defaults(
        of_launch=whole_job._actions,
        of_job=described,
        **{name: value for name, value in defaults.items() if name not in destinations},
    )


def _read_inspected_job(args: argparse.Namespace) -> Job | None:
    """None where no flag describes a model. WlbError where flags describe it or the memory alone, so that they would
    change nothing; of a launch command, Lmax without a memory ignores it."""
    described = args.model is not None or args.hidden_size is not None
    if described and (args.launched or args.gpu_memory is not None):
        return read_job(args)
    if args.launched:
        return None
    requirement = "--gpu-memory" if described else "a model (--model or --hidden-size)"
    for action in args.of_job:
        if getattr(args, action.dest) != action.default:
            flag = action.option_strings[0]
            raise WlbError(f"{flag} changes nothing without {requirement}: add that, or leave it out")
    return None


def _inspect(args: argparse.Namespace) -> None:
    if args.launched:
        args.regather_keys = False  # changes no plan
    lengths, config = _lengths(args), settings(args)
    check_vpp(args.pp, args.vpp)
    messages: list[str] = list(args.notes)
    if args.micro_batch_size > 1:
        messages.append("note: --micro-batch-size is not shown: micro-batches of one window are")
    inspection = inspect_plans(
        lengths,
        config,
        Layout(
            tensor=args.tp,
            context=args.cp,
            pipeline=args.pp,
            data=args.dp,
            virtual=args.vpp,
            micro_batches=args.micro_batches,
        ),
        window=args.window,
        iterations=args.iterations,
        job=_read_inspected_job(args),
        say=messages.append,
    )
    for line in map(renamed, messages):
        if args.json is None:
            print(line)
        elif line.startswith("WARNING"):  # stdout may hold the JSON
            print(line, file=sys.stderr)
    if args.json is None:
        _print_plans(inspection)
    else:
        write_json(inspection, args.json)


def _analyze(args: argparse.Namespace) -> None:
    analysis = run_analyze(args, _lengths(args), settings(args))
    if args.json is None:
        print_analysis(analysis)
    else:
        write_json(as_json(analysis), args.json)


def _lengths(args: argparse.Namespace) -> Lengths:
    """Tokens of each document of the job. Fills in the layout, and the corpora that its flags name.

    --lengths replaces the corpora of a launch command, which need not be on this machine.
    """
    complete_layout(args)
    if args.split is None and args.data_path:
        args.split = "969,30,1"  # as Megatron does
    replaced = args.lengths is not None and args.launched
    args.corpora = () if replaced else tuple(training_corpora(DataPaths.of(args)))
    if args.lengths is not None:
        if args.corpora:
            raise UsageError("--lengths and --data-path both say which documents: give one")
        return read_lengths(args.lengths)
    if not args.corpora:
        raise UsageError("no documents: give --lengths, or the job's --data-path")
    if len(args.corpora) == 1:
        return args.corpora[0].lengths
    return np.concatenate([corpus.lengths for corpus in args.corpora])


def write_json(value: Any, path: str) -> None:
    """Writes to stdout for "-", else to a file that appears whole or not at all."""
    text = json.dumps(value) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_whole(Path(path), text, "--json")


def _print_plans(inspection: dict[str, Any]) -> None:
    for number, iteration in enumerate(inspection["iterations"]):
        rows = []
        for micro_batch in iteration["micro_batches"]:
            columns = _spell(micro_batch["documents"], micro_batch.get("prefix", ()))
            rows.append([f"micro-batch of dp {micro_batch['dp']}", *columns])
            rows += [[f"  cp {rank}", *_spell(part)] for rank, part in enumerate(micro_batch["ranks"])]
        print_table(
            f"iteration {number}: {len(iteration['arrived'])} pieces arrived, {len(iteration['waiting'])} wait",
            ["", "tokens", "padding", "id[start, end)"],
            rows,
        )


def _spell(rows: list[list[int]], prefixes: Sequence[int] = (), limit: int = 6) -> list[str]:
    """Tokens, padding, and the first few pieces or segments of it: 7[25, 43)+25 attends to the 25 tokens before it."""
    tokens, padding = (sum(end - start for i, start, end in rows if (i < 0) == pad) for pad in (False, True))
    before = [f"+{prefix}" if prefix else "" for prefix in prefixes or [0] * len(rows)]
    pairs = zip(rows, before, strict=True)
    words = [f"{i}[{start}, {end}){suffix}" for (i, start, end), suffix in pairs if i >= 0]
    remainder = f" and {len(words) - limit} more" if len(words) > limit else ""
    return [str(tokens), str(padding), " ".join(words[:limit]) + remainder]


if __name__ == "__main__":
    sys.exit(main())
