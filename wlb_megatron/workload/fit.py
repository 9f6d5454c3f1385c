"""Fits costs to a profile: attention (fit_attention.py), the rest of a layer, stage ends, optimizer, links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wlb_megatron.workload.costs import Costs, Curve, TransferCost
from wlb_megatron.workload.fit_attention import fit_attention, least_squares
from wlb_megatron.workload.kernel_table import KernelTable
from wlb_megatron.workload.pairs_table import WAYS, Device, FloatArray, Sample, missing, samples_of
from wlb_megatron.workload.profile import ProfiledModel

LINKS = ("all_gather", "reduce_scatter", "all_to_all", "p2p")


def fit(model: ProfiledModel, samples: Sequence[Sample], device: Device) -> Costs:
    """Costs of what was measured. WlbError where too little was."""
    links = {name: link for name in LINKS if (link := _link(samples, name)) is not None}
    tables = {way: fit_attention(model, samples, device, way, links.get("all_to_all")) for way in WAYS}
    layer, ends = _curve(samples, "layer"), [_curve(samples, part) for part in ("embedding", "loss")]
    (optimizer,) = samples_of(samples, "optimizer")[:1] or missing("the optimizer")
    per_parameter = (optimizer["forward"][0] + optimizer["backward"][0]) / optimizer["sizes"]["parameters"]
    balanced, document = _work([tables[way] for way in WAYS], layer)
    return Costs(
        forward=tables["forward"],
        backward=tables["backward"],
        layer=layer,
        embedding=ends[0],
        loss=ends[1],
        optimizer=per_parameter,
        quadratic_at=balanced,
        per_document=document,
        links=links,
        **_hosts(samples, waits=model.experts is not None),
    )


def _work(tables: Sequence[KernelTable], layer: Curve) -> tuple[float, float]:
    """quadratic_at and per_document: a whole document's layer and attention, d + d*d / quadratic_at + per_document."""
    sizes = np.array([2**n for n in range(7, 18) if 2**n <= tables[0].queries[-1]], dtype=np.int64)
    times = sum(layer.slope()) * sizes + np.sum([table.diagonal_ns(sizes) for table in tables], axis=0)
    columns = np.stack([sizes, sizes.astype(np.float64) ** 2, np.ones(len(sizes))], axis=1)
    token, pair, document = least_squares(columns / times[:, None], np.ones(len(sizes)))
    if not (token > 0 and pair > 0):  # documents too short to separate the two: use the longest one's own
        whole = float(np.sum([table.diagonal_ns(sizes[-1:]) for table in tables]))
        token, pair, document = max(sum(layer.slope()), 1e-3), whole / float(sizes[-1]) ** 2, 0.0
    return float(token / pair), float(document / token)


def _curve(samples: Sequence[Sample], part: str) -> Curve:
    group = sorted(samples_of(samples, part), key=lambda s: s["sizes"]["tokens"])
    if len(group) < 2:
        missing(f"{part} at two token counts")
    forward, backward = (np.maximum.accumulate([float(s[way][0]) for s in group]) for way in WAYS)
    tokens = tuple(float(s["sizes"]["tokens"]) for s in group)
    return Curve(tokens=tokens, forward=tuple(forward.tolist()), backward=tuple(backward.tolist()))


def _hosts(samples: Sequence[Sample], *, waits: bool) -> dict[str, tuple[float, float]]:
    """Of Costs, what launching takes: medians over samples, each of which has its own quicker launches.

    waits: the host waits for a layer's routes, with few tokens least: of its samples the smallest counts.
    """

    def usual(group: Sequence[Sample]) -> FloatArray:
        launches = [[float(s.get(f"host_{way}", 0)) for way in WAYS] for s in group]
        return np.median(launches, axis=0) if launches else np.zeros(2)

    layers = sorted(samples_of(samples, "layer"), key=lambda s: s["sizes"]["tokens"])
    shares = samples_of(samples, "share")
    one_call, two_calls = (
        usual([s for s in shares if bool(s["sizes"]["rectangles"]) == cut]) for cut in (False, True)
    )
    if not any(one_call):  # all of the profile's shares see earlier keys
        one_call = two_calls
    host_times = {
        "host": usual(layers[:1] if waits else layers) + one_call,
        "host_second": np.maximum(two_calls - one_call, 0.0),
        "host_embedding": usual(samples_of(samples, "embedding")),
        "host_loss": usual(samples_of(samples, "loss")),
    }
    return {name: (float(both[0]), float(both[1])) for name, both in host_times.items()}


def _link(samples: Sequence[Sample], name: str) -> TransferCost | None:
    """Latency and time per byte, from the smallest size and from what the largest adds to it.

    Of a collective's buffer each rank has its part already: of 64 MiB over 2 ranks, 32 pass each GPU.
    """
    group = sorted(samples_of(samples, name), key=lambda s: s["sizes"]["bytes"])
    if len(group) < 2:
        return None
    ranks = group[0]["sizes"]["ranks"]
    share = 1.0 if name == "p2p" else (ranks - 1) / ranks
    first, last = group[0], group[-1]
    grown = (last["sizes"]["bytes"] - first["sizes"]["bytes"]) * share
    per_byte = max(last["forward"][0] - first["forward"][0], 1) / grown
    latency = first["forward"][0] - per_byte * first["sizes"]["bytes"] * share
    return TransferCost(latency=max(latency, 0.0), per_byte=per_byte)
