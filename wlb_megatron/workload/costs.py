"""What the parts of a model cost on a GPU, fitted to a profile: attention, layer, stage ends, optimizer, links."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.workload.cost_model import FIXED_NS, LAUNCH_NS, chunk_ns, stage_launch_ns, token_ns
from wlb_megatron.workload.kernel_table import KernelTable, frozen

FloatArray = npt.NDArray[np.float64]
SUMMED = (
    *("call", "segment", "query_row", "key_row", "second_call", "moved_query", "moved_key"),
    *("exchange", "exchange_row"),
)
"""The fields of a kernel table in which forward and backward add up."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Times at several token counts, in nanoseconds: linear between them, and extrapolated beyond the last."""

    tokens: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError("a curve of times needs at least two token counts, ascending")
        if len(self.forward) != len(self.tokens) or len(self.backward) != len(self.tokens):
            raise ValueError("a curve of times needs a forward and a backward for each token count")

    def at(self, tokens: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Forward and backward at `tokens`, in nanoseconds. Below the first count, the time of the first count."""
        t = np.asarray(tokens, dtype=np.float64)
        return self._line(t, self.forward), self._line(t, self.backward)

    def slope(self) -> tuple[float, float]:
        """Forward and backward nanoseconds per token, from the middle count to the last."""
        low, high = len(self.tokens) // 2 if len(self.tokens) > 2 else 0, -1
        span = self.tokens[high] - self.tokens[low]
        forward, backward = (way[high] - way[low] for way in (self.forward, self.backward))
        return forward / span, backward / span

    def _line(self, t: FloatArray, times: tuple[float, ...]) -> FloatArray:
        last = (times[-1] - times[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond = np.maximum(t - self.tokens[-1], 0.0)
        return np.interp(t, self.tokens, times) + beyond * max(last, 0.0)


@dataclass(frozen=True, kw_only=True)
class TransferCost:
    """A collective or transfer takes latency + bytes * per_byte, nanoseconds. bytes: those that pass each GPU."""

    latency: float
    per_byte: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """One tensor-parallel rank's costs, in nanoseconds unless said otherwise.

    * forward, backward: attention tables of one layer. layer: the rest of a layer, without communication.
    * embedding, loss: more on the first and last stage. optimizer: per parameter that a GPU owns.
    * host: to launch a layer's forward and its backward. host_second: more for a call on earlier keys.
      host_embedding, host_loss: more on the first and last stage.
    * links: times of the collectives that were measured.
    * quadratic_at, per_document: in tokens, as in the cost model that packing balances by (cost_model.py).
    """

    forward: KernelTable
    backward: KernelTable
    layer: Curve
    embedding: Curve
    loss: Curve
    optimizer: float
    quadratic_at: float
    per_document: float
    host: tuple[float, float] = (0.0, 0.0)
    host_second: tuple[float, float] = (0.0, 0.0)
    host_embedding: tuple[float, float] = (0.0, 0.0)
    host_loss: tuple[float, float] = (0.0, 0.0)
    links: dict[str, TransferCost] | None = None

    @cached_property
    def table(self) -> KernelTable:
        """Attention's forward + backward, by which shardings are chosen."""
        a, b = self.forward, self.backward
        summed: dict[str, Any] = {name: getattr(a, name) + getattr(b, name) for name in SUMMED}
        largest = a.rectangle[-1][-1], b.rectangle[-1][-1]
        return replace(
            a,
            forward_share=largest[0] / sum(largest),
            rectangle=_add(a.rectangle, b.rectangle),
            bottom_right=_add(a.bottom_right, b.bottom_right),
            diagonal=tuple(x + y for x, y in zip(a.diagonal, b.diagonal, strict=True)),
            **summed,
        )

    def token_ns(self, recompute: float) -> float:
        """Linear work of a token in a layer, forward + backward (ns). recompute: share of recomputed layers."""
        slopes = self.layer.slope()
        return sum(slopes) + recompute * slopes[0]

    def fixed_ns(self, recompute: float) -> float:
        """Time of a layer and its attention for a micro-batch of almost no tokens, forward + backward (ns)."""
        fixed = [float(way) for way in self.layer.at(0)]
        return sum(fixed) + recompute * fixed[0] + self.table.call + self.table.second_call

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; from_dict reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Costs:
        """Reads as_dict's result. Raises KeyError, TypeError or ValueError if `fields` is not of that form."""
        parts: dict[str, Any] = {
            name: KernelTable(**frozen(fields[name])) for name in ("forward", "backward")
        }
        parts |= {name: Curve(**frozen(fields[name])) for name in ("layer", "embedding", "loss")}
        links = {name: TransferCost(**link) for name, link in (fields["links"] or {}).items()}
        for name in ("host", "host_second", "host_embedding", "host_loss"):
            if name in fields or name == "host":  # the first profiles lack the others
                forward, backward = fields[name]
                parts[name] = (float(forward), float(backward))
        for name in ("optimizer", "quadratic_at", "per_document"):
            parts[name] = float(fields[name])
        return Costs(**parts, links=links)


def _add(a: tuple[tuple[float, ...], ...], b: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(x + y for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True))


class MicroBatchCost(NamedTuple):
    """Costs of a micro-batch, in tokens of linear work over all context-parallel ranks.

    What it adds to its documents' work, the least that its forward and its backward take (the host's launches), and
    what a chunk in it adds.
    """

    own: float = 0.0
    least: tuple[float, float] = (0.0, 0.0)
    chunk: float = 0.0


def micro_batch_cost(
    costs: Costs | None,
    parameters: float,
    width: float,
    context_ranks: int,
    *,
    recompute: float,
    layers: int | None,
) -> MicroBatchCost:
    """What a micro-batch costs besides its documents; each context-parallel rank launches for itself.

    costs: a profile's; None: figures of H100 and H200 hosts. parameters: a layer's on one tensor-parallel rank.
    width: its heads x channels. recompute: share of the layers whose backward runs the whole forward again. layers: a
    pipeline stage's; None: no pipeline.
    """
    if costs is not None:
        token, own, launch = costs.token_ns(recompute), costs.fixed_ns(recompute), costs.host
    else:
        token, own, launch = token_ns(parameters, recompute), FIXED_NS, LAUNCH_NS
    forward, backward = (context_ranks * way / token for way in stage_launch_ns(launch, recompute, layers))
    return MicroBatchCost(
        context_ranks * own / token,
        (forward, backward),
        context_ranks * chunk_ns(width, context_ranks) / token,
    )
