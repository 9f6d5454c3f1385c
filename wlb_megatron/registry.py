"""What the plugin can choose from, one entry each: packers, shardings, modes of context
parallelism, and attention kernels.

Flags take their choices and help from these tables, refusals ask them what an entry can do, and the contract tests run
over every entry. CONTRIBUTING.md tells how to add one: its code in a file of its own, and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from wlb_megatron.errors import WlbError


@dataclass(frozen=True, slots=True)
class Entry:
    """One choice.

    Args:
        code: place of its class or function, "module:name". It is imported when it is used.
        help: its words in the flag's help.
        instead: the entry that flags take in its place, with a line, for a name that they no longer offer.
        note: words that this line adds.
    """

    code: str
    help: str
    instead: str = ""
    note: str = ""

    def load(self) -> Any:
        """Imports the class or function."""
        return load(self.code)


@dataclass(frozen=True, slots=True)
class PackerEntry(Entry):
    """A packer: a packing.packer.Packer, or a function that returns one, of a PackingJob.

    Args:
        settings: fields of WlbConfig that this packer alone reads.
        fixed_windows: each micro-batch is one window of --seq-length tokens at most. Such a packer makes no chunks, and
            as many micro-batches as there are windows. Else it makes micro-batches of up to --wlb-max-tokens.
    """

    settings: tuple[str, ...] = ()
    fixed_windows: bool = True


@dataclass(frozen=True, slots=True)
class ShardingEntry(Entry):
    """A sharding: a function (pieces, cp_size, table) that returns the shard plan of each micro-batch, see
    sharding.cut.

    Args:
        chooses: instead of code, shardings of which the one that is predicted fastest is taken for each micro-batch;
            on a tie, the first. Such a sharding also chooses the number of kernel calls.
    """

    chooses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelsEntry(Entry):
    """Attention kernels on GPUs: a class with the methods of attention.sharded_attention.Kernels.

    Args:
        label: how messages call them.
        unfit: a function (of kernel_choice.Layer) that says why they cannot serve a layer, or None if they can.
        packages: versions of the packages that they need, by name; no other version is used.
        extra: the one of setup.py that installs these.
        by_size: each size of call needs a kernel of its own (cuDNN's graphs); else each kind of call does.
    """

    label: str = ""
    unfit: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    extra: str = ""
    by_size: bool = False


_VARLEN_CODE = "wlb_megatron.packing.factory:make_varlen"
_GONE = "`python -m scripts.reproduce`, in a clone, compares fixed windows, balanced"
_CUTS = "wlb_megatron.sharding"

PACKERS: dict[str, PackerEntry] = {
    "original": PackerEntry(
        "wlb_megatron.packing.baselines:OriginalPacker", "arrival order, windows of --seq-length"
    ),
    **{
        name: PackerEntry(_VARLEN_CODE, "varlen", instead="varlen", note=_GONE, fixed_windows=False)
        for name in ("fixed-greedy", "fixed-solver")
    },
    "varlen": PackerEntry(
        _VARLEN_CODE,
        "micro-batches of variable length",
        settings=("max_tokens", "thresholds", "max_delay", "batch_spread"),
        fixed_windows=False,
    ),
}
"""--wlb-packing."""

SHARDINGS: dict[str, ShardingEntry] = {
    "per-sequence": ShardingEntry(f"{_CUTS}.slots:per_sequence", "the packed sequence in equal slices"),
    "per-document": ShardingEntry(f"{_CUTS}.slots:per_document", "each document in equal slices"),
    "hybrid": ShardingEntry(
        f"{_CUTS}.hybrid:hybrid", "short documents whole, long ones cut", instead="adaptive"
    ),
    "adaptive": ShardingEntry(
        "",
        "for each micro-batch the one that is predicted fastest: these, or short documents whole and long ones cut",
        chooses=("per-sequence", "per-document", "hybrid"),
    ),
}
"""--wlb-sharding."""

CP_MODES: dict[str, Entry] = {
    "fixed": Entry("", "groups of --context-parallel-size"),
    "dynamic": Entry(
        "wlb_megatron.plugin.plans.dynamic:training_plans",
        "in each step groups of different sizes among the data- and context-parallel ranks, planned by predicted time",
    ),
}
"""--wlb-cp-mode: ranks that share a micro-batch."""

_KERNELS = "wlb_megatron.attention.kernels"

KERNELS: dict[str, KernelsEntry] = {
    "fa4": KernelsEntry(
        f"{_KERNELS}.fa4_backend:FlashAttention4Kernels",
        "FlashAttention-4, needs the extra fa4",
        label="FlashAttention-4",
        unfit=f"{_KERNELS}.kernel_choice:unfit_for_fa4",
        # flash-attn-4 is a beta with private entry points, and its compiler's version matters as much. Before another
        # version is named, read anew what decides the compiled kernels that fa4_backend._kind launches directly.
        packages={"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5"},
        extra="fa4",
    ),
    "cudnn": KernelsEntry(
        f"{_KERNELS}.te_backend:TransformerEngineKernels",
        "through Transformer Engine",
        label="cuDNN",
        by_size=True,
    ),
}
"""--wlb-kernels: `auto` takes the first that is installed and serves the layer. The last serves every layer."""

USUAL_KERNELS = list(KERNELS)[-1]


def builds_by_size(kernels: str) -> bool:
    """Whether kernels of this name, of the registry or not, are built anew for each size of call."""
    return kernels in KERNELS and KERNELS[kernels].by_size


def load(code: str) -> Any:
    """Imports the class or function "module:name"."""
    module, name = code.split(":")
    return getattr(import_module(module), name)


def choices(entries: Mapping[str, Entry]) -> str:
    """What the help of a flag says of the entries that it offers: "original (arrival order), varlen (..)"."""
    return ", ".join(f"{name} ({entry.help})" for name, entry in entries.items() if not entry.instead)


def packer_entry(name: str) -> PackerEntry:
    """The entry of --wlb-packing NAME. WlbError if there is none."""
    if name not in PACKERS:
        raise WlbError(f"unknown packing {name!r}: choose {', '.join(PACKERS)}")
    return PACKERS[name]
