"""What a document costs (WLB-LLM section 4.1: Wa + Wl), in integers so that every rank compares alike; what a
micro-batch costs whatever documents it holds: fixed kernels of a layer, and the host's launches; and, if a profile
measured them, what the parts of a model cost: attention, layer, stage ends, optimizer, links.

Ratios to a token's linear work are the same for one layer and for a stage of many. So all is counted for one layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.plan import UNITS_PER_TOKEN
from wlb_megatron.workload.kernel_table import KernelTable, frozen


@dataclass(frozen=True, slots=True)
class CostModel:
    """work(d) = d + d*d / quadratic_at + per_document, in tokens of linear work.

    Costs are in tokens of linear work. Those of micro-batches and chunks do not enter `work`.

    Args:
        quadratic_at: Tokens at which attention (Wa, quadratic) equals everything else (Wl, linear).
        per_document: Launch and tile cost of one more document.
        per_micro_batch: Cost of one more micro-batch by itself, for kernel calls and fixed kernels.
        least_micro_batch: The host's launches of its forward and its backward, which take at least that.
        per_chunk: Further cost of a micro-batch that shares a document with others.
        backward: How many times as long as a forward a backward takes: 3 if it recomputes all layers, 2.5 for half.
    """

    quadratic_at: float
    per_document: float = 0.0
    per_micro_batch: float = 0.0
    least_micro_batch: tuple[float, float] = (0.0, 0.0)
    per_chunk: float = 0.0
    backward: float = 2

    def __post_init__(self) -> None:
        if not self.quadratic_at > 0:
            raise ValueError(f"quadratic_at must be positive, got {self.quadratic_at}")
        if self.per_document < 0:
            raise ValueError(f"per_document must not be negative, got {self.per_document}")

    def with_micro_batch_cost(self, cost: float | None) -> CostModel:
        """The same where a user says what a micro-batch costs by itself; what a chunk costs changes in proportion."""
        if cost is None or cost == self.per_micro_batch:
            return self
        chunk = self.per_chunk * cost / self.per_micro_batch if self.per_micro_batch else self.per_chunk
        return replace(self, per_micro_batch=cost, per_chunk=chunk)

    def work(self, lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Work of documents of these lengths (tokens), int64 in 1/1024 token. Empty documents cost nothing.

        With quadratic_at=4, lengths [0, 4, 8] cost [0, 8, 24] tokens: 8 + 64/4.
        """
        d = np.asarray(lengths, dtype=np.float64)
        tokens = d + d * d / self.quadratic_at + np.where(d > 0, self.per_document, 0.0)
        return np.rint(tokens * UNITS_PER_TOKEN).astype(np.int64)


MATRIX_FLOPS = 650e12
"""Assumed rate of matrix products on an H100 (FLOP/s)."""

ATTENTION_RATE = 0.7
"""Assumed rate of attention kernels over that of matrix products (about 450 against 650 TFLOP/s on an H100)."""


def quadratic_at(query: int, parameters: int) -> float:
    """Document length at which a layer's attention costs as much as its matrix products.

    `query` is heads x channels, `parameters` a layer's. Forward + backward FLOPs: attention 3.5 * 2 * d*d * query (the
    causal half of two products, the backward 2.5 times the forward), everything else 3 * 2 * d * parameters.
    A 7B shape (hidden 4096, ffn 11008, gated) gives 29.6K tokens.
    """
    return 3 * parameters * ATTENTION_RATE / (3.5 * query)


def latent_parameters(
    hidden: int, heads: int, query_rank: int, key_rank: int, dims: tuple[int, int, int]
) -> int:
    """Weights of a layer of multi-latent attention.

    Ranks are those of compressed queries (0 if they are not) and of keys with values. `dims` are channels of a head
    without positions, with positions, of values. 7168, 128 heads, ranks 1536 and 512, dims 128 64 128: 187M.
    """
    plain, turned, value = dims
    query = heads * (plain + turned)
    query = hidden * query_rank + query_rank * query if query_rank else hidden * query
    return query + hidden * (key_rank + turned) + key_rank * heads * (plain + value) + heads * value * hidden


def with_windows(at: float, window: int, full_share: float) -> float:
    """quadratic_at of a model in which only a share of the layers sees whole documents, the others a window.

    at: quadratic_at of layers that see all. A windowed layer's attention takes 2 * window / at of a token's linear
    work, at any length: with half of the layers full, at 24K and a window of 1K, it is (24K + 1K) / 0.5.
    """
    return (at + 2 * window * (1 - full_share)) / max(full_share, 1e-6)


def document_cost(segment_ns: float, parameters: int) -> float:
    """What one more document costs, in tokens of linear work: two segments of a kernel call.

    segment_ns: all heads' together, forward + backward; a token takes 6 FLOPs a parameter. Whatever divides heads
    and parameters alike (tensor parallelism) cancels, and context parallelism is left out, so that plans do not
    depend on the layout. 3.8 us a segment and 202M parameters: 4 tokens a document.
    """
    return 2 * segment_ns / (6 * parameters / MATRIX_FLOPS * 1e9)


MICRO_BATCH_TOKENS = 1000.0
"""What a micro-batch adds on each context-parallel rank if no model is known (tokens of linear work)."""

FIXED_NS = 600e3
"""A layer's time, forward + backward, for a micro-batch of almost no tokens (ns). On H100 and H200 it is 0.39 to 0.44
ms outside attention and 0.15 to 0.26 ms for attention's calls (profiles in docs/results)."""

LAUNCH_NS = (2.7e6, 3.3e6)
"""The host's time to launch a layer's forward and its backward (ns), on an H200's host (docs/results)."""

EXPERTS_NS = (2.7e6, 2.8e6)
"""What a layer with experts adds to that: from a Qwen3-30B-A3B layer (docs/results/1x_h200/expert_layers.csv)."""

EXPERT_NS, ONE_KERNEL_NS = (0.08e6, 0.20e6), (0.0, 0.24e6)
"""What each expert of a rank adds: two products forward, four and two sums of gradients backward. Where one kernel
multiplies all experts, weights' gradients have a product each still. From steps of one H200
(docs/results/1x_h200/expert_steps.csv): 0.1 and 0.28 ms, of which 0.1 ms went into choosing kernels that cuBLAS had
chosen before (expert_kernel_choices.csv there). Training keeps those choices now."""

EXPERTS_EXCHANGE_NS = 7e6
"""What exchanging rows with the experts of other ranks adds to each way of such a layer's launch: EP2 on two hosts, one
a fifth slower than this and one faster (docs/results/2x_h200/expert_steps.csv, runs 2 and 3)."""

EXPERT_WAIT_NS = (0.06e6, 0.04e6)
"""For how much of that the device waits, an expert, without --moe-permute-fusion: Megatron's permutation then makes the
host wait for the device in every layer. From the same steps."""

STAGE_NS = 18e6
"""The host's time per micro-batch on a pipeline stage outside its layers (ns), forward and backward: draws, transfers.
On four H200s, 4 layers a stage with full recompute, 33 steps of 4 to 24 micro-batches took 48 to 57 ms per micro-batch,
however few its tokens. The layers' launches are 35 of that (docs/results/4x_h200/micro_batches_first.csv). The host
still waited for the device at each transfer then, so this is at most what it takes now."""

CHUNK_NS = 0.65e6
"""What a layer's backward takes besides its kernels in a micro-batch that shares a document with others (ns). Earlier
keys are gathered again, and their gradients added. On two H200s, CP=1, 16 heads of 128 channels, 4 layers a stage,
220 backwards of 9K tokens took 2.2 to 3.7 ms more than predicted; those of whole documents took 0.0 more
(docs/simulation.md)."""

CHUNK_WIDTH = 2048
"""Heads x channels of a rank in that measurement."""


def chunk_ns(width: float, context_ranks: int) -> float:
    """The same on one of `context_ranks` ranks with heads x channels of `width`.

    It is assumed proportional to rows and heads, of which each rank has its share. Only one rank was measured.
    """
    return CHUNK_NS * width / CHUNK_WIDTH / context_ranks


def stage_launch_ns(
    launch: tuple[float, float], recompute: float, layers: float | None
) -> tuple[float, float]:
    """The host's time for a micro-batch's forward and backward, over the layers of its stage (ns).

    launch: a layer's forward and backward. recompute: share of the layers whose forward is launched again in the
    backward. layers: a pipeline stage's; None: no pipeline.
    """
    forward, backward = launch
    per_layer = STAGE_NS / layers / 2 if layers else 0.0
    return forward + per_layer, backward + recompute * forward + per_layer


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

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Costs:
        """The inverse of dataclasses.asdict. KeyError, TypeError or ValueError if `fields` is not of that form."""
        parts: dict[str, Any] = {
            name: KernelTable(**frozen(fields[name])) for name in ("forward", "backward")
        }
        parts |= {name: Curve(**frozen(fields[name])) for name in ("layer", "embedding", "loss")}
        links = {name: TransferCost(**link) for name, link in (fields["links"] or {}).items()}
        for name in ("host", "host_second", "host_embedding", "host_loss"):
            forward, backward = fields[name]
            parts[name] = (float(forward), float(backward))
        parts |= {name: float(fields[name]) for name in ("optimizer", "quadratic_at", "per_document")}
        return Costs(**parts, links=links)


def _add(a: tuple[tuple[float, ...], ...], b: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(x + y for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True))


class MicroBatchCost(NamedTuple):
    """Costs of a micro-batch as a CostModel has them, in tokens of linear work over all context-parallel ranks.

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
        # A token's products are 2 FLOPs a parameter in each forward, 4 in the backward.
        token, own, launch = (6 + 2 * recompute) * parameters / MATRIX_FLOPS * 1e9, FIXED_NS, LAUNCH_NS
    forward, backward = (context_ranks * way / token for way in stage_launch_ns(launch, recompute, layers))
    return MicroBatchCost(
        context_ranks * own / token,
        (forward, backward),
        context_ranks * chunk_ns(width, context_ranks) / token,
    )
