"""Reads a launch command of training as it is pasted: torchrun's arguments, the script, and Megatron's flags."""

from __future__ import annotations

import argparse
import copy
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError

_NAMES = """
context-parallel-size cpu-offloading-num-layers data-args-path data-path expert-model-parallel-size
expert-tensor-parallel-size ffn-hidden-size fine-grained-activation-offloading global-batch-size group-query-attention
hidden-dropout hidden-size hybrid-layer-pattern kv-channels kv-lora-rank micro-batch-size moe-ffn-hidden-size
moe-grouped-gemm moe-layer-freq moe-permute-fusion moe-router-load-balancing-type moe-router-topk
moe-shared-expert-intermediate-size mtp-num-layers linear-conv-kernel-dim linear-key-head-dim
linear-num-key-heads linear-num-value-heads
linear-value-head-dim multi-latent-attention no-gradient-accumulation-fusion num-attention-heads num-experts num-layers
num-layers-per-virtual-pipeline-stage num-query-groups num-virtual-stages-per-pipeline-rank overlap-grad-reduce
overlap-param-gather per-split-data-args-path pipeline-model-parallel-size q-lora-rank qk-head-dim qk-layernorm
qk-pos-emb-head-dim recompute-activations recompute-granularity recompute-method recompute-num-layers seed seq-length
sequence-parallel split swiglu tensor-model-parallel-size test-data-path train-data-path train-iters train-samples
untie-embeddings-and-output-weights use-distributed-optimizer use-megatron-fsdp use-torch-fsdp2 v-head-dim
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


@dataclass(frozen=True)
class Launch:
    """The flags of the training script. world: GPUs, None where the command does not say. environment: variables that
    the command sets (NAME=VALUE, also after env)."""

    flags: tuple[str, ...]
    world: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def read_launch(words: Sequence[str]) -> Launch:
    """Splits a command into what torchrun takes and what the script takes.

    ["torchrun", "--nproc-per-node", "8", "-m", "wlb_megatron.launch", "pretrain_gpt.py", "--num-layers", "2"]: 8 GPUs,
    and the last two words. Words that begin with a flag are Megatron's flags alone.
    """
    if not words or words[0].startswith("-"):
        return Launch(tuple(words))
    begin = _script_end(words)
    starter = list(words[:begin])
    runs = any(
        word.rsplit("/", 1)[-1] == "torchrun" or word.startswith("torch.distributed.") for word in starter
    )
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default="1")
    try:
        sizes, _ = parser.parse_known_args(starter)
        world = int(sizes.nnodes) * int(sizes.nproc_per_node) if runs else None
    except (ValueError, argparse.ArgumentError):  # "gpu", "auto", "1:4", a shell's variable
        world = None
    sets = dict(word.split("=", 1) for word in starter if "=" in word and not word.startswith("-"))
    return Launch(tuple(words[begin:]), world, sets)


def _script_end(words: Sequence[str]) -> int:
    """The place after the script, or after the module that is the script."""
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return place + 1
    for place, (flag, module) in enumerate(pairwise(words)):
        if flag == "-m" and not module.startswith("torch."):
            return place + 2
    raise WlbError(
        f"no training script in {' '.join(words[:4])!r}: paste the whole command, or only its flags, after --"
    )


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
    flags = dict.fromkeys(word.split("=")[0] for word in unknown)
    settings = {f"--wlb-{setting.name.replace('_', '-')}" for setting in fields(WlbConfig)}
    others = [flag for flag in flags if flag.startswith("--wlb-") and flag not in settings]
    unread = [flag for flag in flags if flag not in MEGATRON | settings]
    names = sorted(MEGATRON | settings)
    near = {flag: difflib.get_close_matches(flag, names, n=1, cutoff=0.9) for flag in unread}
    # Without --, for which a message would have the commands' own name.
    notes = dict.fromkeys(others, "wlb_megatron has no such flag in this release")
    notes |= {flag: f"did you mean {name[2:]}?" for flag, nearest in near.items() for name in nearest}
    notes |= PASSED_OVER
    return [f"note: {flag} is not predicted: {notes[flag]}" for flag in flags if flag in notes]
