"""Every entry of the registry can be used, flags offer just what it lists, and what they dropped has a substitute."""

import argparse
from dataclasses import fields, replace

import pytest
from plan_checks import validate

from wlb_megatron.arguments import add_arguments, config_from_args, removed_flags, take_instead
from wlb_megatron.attention.kernels import kernel_choice
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import Packer, PackingJob
from wlb_megatron.registry import CP_MODES, KERNELS, PACKERS, SHARDINGS, Entry, KernelsEntry
from wlb_megatron.sharding.slots import PieceList
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.kernel_table import h100

KINDS: dict[str, dict[str, Entry]] = {
    "packing": {**PACKERS},
    "sharding": {**SHARDINGS},
    "cp_mode": {**CP_MODES},
}
ENTRIES = [(field, name) for field, entries in KINDS.items() for name in entries]


@pytest.mark.parametrize("name", PACKERS)
def test_every_packer_is_made_of_a_job_alone(name):
    packer = make_packer(PackingJob(WlbConfig(packing=name), CostModel(8.0), window=16, micro_batches=2))
    assert isinstance(packer, Packer) and packer.bins == 2 and not packer.waiting
    assert packer.max_tokens == 16 or not PACKERS[name].fixed_windows


@pytest.mark.parametrize("name", [name for name, entry in SHARDINGS.items() if entry.code])
def test_every_sharding_cuts_several_micro_batches(name):
    plans = SHARDINGS[name].load()(PieceList.of([[5, 3], [16]]), 2, h100())
    assert [plan.tokens for plan in plans] == [8, 16]
    for plan in plans:
        validate(plan)


@pytest.mark.parametrize(("field", "name"), ENTRIES)
def test_an_entry_has_help_and_names_settings_and_entries_that_there_are(field, name):
    entry, entries = KINDS[field][name], KINDS[field]
    assert entry.help and set(getattr(entry, "settings", ())) <= {
        setting.name for setting in fields(WlbConfig)
    }
    assert not entry.instead or not entries[entry.instead].instead
    assert set(getattr(entry, "chooses", ())) <= entries.keys()


@pytest.mark.parametrize("field", KINDS)
def test_a_flag_takes_what_the_registry_lists_and_shows_what_it_offers(field):
    parser = add_arguments(argparse.ArgumentParser())
    flag = f"--wlb-{field.replace('_', '-')}"
    (action,) = [action for action in parser._actions if flag in action.option_strings]
    assert all(name in (action.choices or ()) for name in KINDS[field])
    offered = [name for name, entry in KINDS[field].items() if not entry.instead]
    assert list(action.choices or ()) == offered, "so messages do not name the others"
    assert all(f"{name} ({KINDS[field][name].help})" in (action.help or "") for name in offered)


def test_a_backend_is_one_entry(monkeypatch):
    """The flag takes it, `auto` takes it for layers that it serves, and messages call it by its label."""
    assert all(entry.help and entry.label for entry in KERNELS.values())
    mine = KernelsEntry("fractions:Fraction", "mine, to try", label="Mine", unfit=f"{__name__}:odd_heads")
    monkeypatch.setattr(kernel_choice, "KERNELS", {"mine": mine, **KERNELS})
    here = kernel_choice.Layer(64, 64, capability=(9, 0))
    odd = replace(here, dim=65)
    assert kernel_choice.chosen("auto", here) == ("mine", "")
    why = "heads of 65 channels are odd"
    assert kernel_choice.chosen("auto", replace(odd, capability=(8, 0))) == ("cudnn", why)
    assert kernel_choice.describe("cudnn", "why") == "cuDNN's kernels, not Mine's: why"
    assert kernel_choice.kernels("mine", True) == 1
    refused = "--wlb-kernels mine cannot be used: heads of 65 channels are odd; use"
    with pytest.raises(WlbError, match=refused):
        kernel_choice.chosen("mine", odd)


def odd_heads(layer: kernel_choice.Layer) -> str | None:
    return f"heads of {layer.dim} channels are odd" if layer.dim % 2 else None


def test_a_value_that_flags_no_longer_offer_is_taken_for_another_with_a_line():
    parser = add_arguments(argparse.ArgumentParser())
    flags = ["--wlb-sharding", "hybrid", "--wlb-packing", "fixed-solver"]
    config, lines = take_instead(config_from_args(parser.parse_args(flags)))
    assert config == replace(WlbConfig(), sharding="adaptive", packing="varlen")
    assert lines == [
        "--wlb-packing fixed-solver is varlen from this release on, and will be refused from the next: write "
        "--wlb-packing varlen (`python -m scripts.reproduce`, in a clone, compares fixed windows, balanced)",
        "--wlb-sharding hybrid is adaptive from this release on, and will be refused from the next: write "
        "--wlb-sharding adaptive",
    ]
    assert take_instead(WlbConfig()) == (WlbConfig(), [])


def test_a_removed_flag_is_taken_for_one_release_with_a_line():
    parser = add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(
        ["--wlb-graph-seconds", "15", "--wlb-release", "full", "--wlb-solver-seconds", "2"]
    )
    assert config_from_args(args) == WlbConfig() and "graph-seconds" not in parser.format_help()
    assert removed_flags(args) == [
        "--wlb-graph-seconds does nothing from this release on, and will be refused from the next: leave it out "
        "(attention graphs are built for at most a minute before step 1)",
        "--wlb-release does nothing from this release on, and will be refused from the next: leave it out "
        "(outlier queues release the documents that balance best)",
        "--wlb-solver-seconds does nothing from this release on, and will be refused from the next: leave it out "
        "(dynamic groups are planned without a solver, which never won at real sizes)",
    ]
    assert not removed_flags(parser.parse_args([]))
