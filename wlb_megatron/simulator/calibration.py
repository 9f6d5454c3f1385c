"""Assumed figures of a cluster, as flags, and what a profile measured in their place, for any shape of model."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from wlb_megatron.config import real, whole
from wlb_megatron.errors import WlbError, explain_bad_values
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.costs import Costs
from wlb_megatron.workload.kernel_table import KernelTable, builtin, builtin_names
from wlb_megatron.workload.model import Model
from wlb_megatron.workload.profile import Profile, read_profile

DEFAULTS = Assumptions()


def calibrated(assumptions: Assumptions, profile: Profile) -> Assumptions:
    """Assumptions adjusted to a profile.

    With the returned rate of matrix products, the model's arithmetic gives the profiled layer's time per token, with
    element-wise kernels at their assumed rate. NVLink's rate and latency are those of the profile's all-gather. A
    figure that the user changed from its default stays.
    """
    model, costs = profile.model, profile.costs
    widths = assumptions.activation_passes * model.hidden + assumptions.ffn_passes * model.ffn
    elements = 3 * 2 * widths / model.tp / assumptions.memory_rate * 1e9
    products = sum(costs.layer.slope()) - elements
    adjusted = assumptions
    if products > 0:
        adjusted = replace(adjusted, matmul_rate=3 * 2 * model.rank_parameters_passed / products * 1e9)
    adjusted = with_links(adjusted, costs)
    users = {f.name: getattr(assumptions, f.name) for f in fields(assumptions)}
    return replace(
        adjusted, **{name: value for name, value in users.items() if value != getattr(DEFAULTS, name)}
    )


def with_links(assumptions: Assumptions, costs: Costs | None) -> Assumptions:
    """Assumptions with NVLink's rate and latency from the profile's all-gather, if it has one."""
    link = ((costs and costs.links) or {}).get("all_gather")
    if link is None:
        return assumptions
    return replace(assumptions, nvlink_rate=1e9 / link.per_byte, nvlink_latency=link.latency / 1e9)


def profiled_shape(profile: Profile, layers: int) -> Model:
    """The profiled model with this many layers."""
    sizes = {part.name: getattr(profile.model, part.name) for part in fields(Model)}
    return Model(**sizes | {"layers": layers, "experts": None})


def add_assumptions(parser: argparse.ArgumentParser, defaults: Assumptions) -> None:
    """One flag for each figure, and the kernel table."""
    group = parser.add_argument_group(
        "assumptions",
        "figures of the cluster that are assumed, not measured; with --profile some are measured",
    )
    for assumption in fields(Assumptions):
        kind = whole(1) if assumption.name == "node" else real(0)
        value = getattr(defaults, assumption.name)
        group.add_argument(
            f"--{assumption.name.replace('_', '-')}",
            type=kind,
            default=None if assumption.name == "network_rate" else value,  # --network-gbps may say it
            help=f"{assumption.metadata['help']} (default: {value:g})",
        )
    parser.add_argument(
        "--network-gbps",
        type=real(0),
        help=f"the same as --network-rate in Gbit/s (default: {defaults.network_rate * 8e-9:g})",
    )
    parser.add_argument(
        "--kernel-table",
        metavar="NAME|PATH",
        help=f"attention times: a built-in table ({', '.join(builtin_names())}), or a JSON file of another GPU's "
        "(default: h100)",
    )
    parser.add_argument(
        *("--wlb-profile", "--profile"),
        dest="profile",
        metavar="PATH",
        help="file of wlb-megatron profile; what it measured replaces the kernel table and the assumptions about it "
        "(default: none)",
    )


def read_assumptions(args: argparse.Namespace) -> tuple[Assumptions, KernelTable, Profile | None]:
    """Figures as the flags say, attention of a kernel table, and the profile that they are of, if one is given."""
    with explain_bad_values():
        rates = {field.name: getattr(args, field.name) for field in fields(Assumptions)}
        if args.network_gbps is not None:
            if args.network_rate is not None:
                raise WlbError("--network-gbps and --network-rate say the same: give one")
            if not args.network_gbps:
                raise WlbError("--network-gbps 0 is no rate: give the Gbit/s of a GPU's network card")
            rates["network_rate"] = args.network_gbps * 1e9 / 8
        figures = Assumptions(**{name: rate for name, rate in rates.items() if rate is not None})
        if args.profile is not None:
            if args.kernel_table is not None:
                raise WlbError("--profile brings its own kernel table: drop --kernel-table")
            profile = read_profile(args.profile)
            return calibrated(figures, profile), profile.costs.table, profile
        source = args.kernel_table or "h100"
        if source not in builtin_names() and not Path(source).exists():
            raise WlbError(f"no kernel table {source}: give {', '.join(builtin_names())} or a JSON file")
        return figures, builtin(source) if source in builtin_names() else KernelTable.from_json(source), None
