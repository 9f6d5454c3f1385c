"""Replaces assumptions by what a profile measured, for models of other shapes than the profiled one."""

from __future__ import annotations

from dataclasses import fields, replace

from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.costs import Costs
from wlb_megatron.workload.model import Model
from wlb_megatron.workload.profile import Profile

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
