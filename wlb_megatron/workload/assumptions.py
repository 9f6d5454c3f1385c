"""Every rate and network figure the simulator assumes, in one place. What is measured is in the kernel table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from wlb_megatron.workload.cost_model import Costs
from wlb_megatron.workload.kernel_table import KernelTable


def _assumed(value: float, help: str) -> Any:
    return field(default=value, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Figures of an H100 cluster; none of them was measured. The text of each is its flag's help, with its unit."""

    matmul_rate: float = _assumed(650e12, "rate of a GPU's bf16 matrix products (FLOP/s)")
    memory_rate: float = _assumed(2.5e12, "memory bandwidth of a GPU's element-wise kernels (bytes/s)")
    nvlink_rate: float = _assumed(370e9, "bandwidth from a GPU to the others of its node (bytes/s)")
    network_rate: float = _assumed(45e9, "bandwidth from a GPU to other nodes (bytes/s)")
    node: int = _assumed(8, "GPUs of a node (count)")
    nvlink_latency: float = _assumed(10e-6, "latency of a collective or transfer within a node (seconds)")
    network_latency: float = _assumed(25e-6, "latency of a collective or transfer between nodes (seconds)")
    activation_passes: float = _assumed(
        12,
        "times that the forward of a layer reads or writes a row of hidden-size in element-wise kernels: norms, "
        "residuals, rotary embedding; backward takes twice as many (count)",
    )
    ffn_passes: float = _assumed(
        3, "the same for rows of ffn-hidden-size, in the activation function (count)"
    )
    expert_passes: float = _assumed(
        12,
        "times that the forward of a layer reads or writes a row of hidden-size for each expert that a token passes: "
        "routing, permutation; backward takes 1.7 times as many (count)",
    )
    expert_rows: float = _assumed(
        400, "rows that each expert of a GPU adds to its matrix products, because small ones are slow (count)"
    )
    tp_exposed: float = _assumed(
        1.0,
        "tensor parallelism's communication that matrix products do not hide; less with --tp-comm-overlap (share, 0 to "
        "1)",
    )
    dp_exposed: float = _assumed(
        0.0,
        "gradient reduction and parameter gather that the last backward and the first forward could hide but do not; "
        "1: no overlap (share, 0 to 1)",
    )
    host_launch: float = _assumed(
        1.0,
        "scale of the host's launch times, the least time of a micro-batch (from the profile, else measured on an "
        "H200's host); 0: the host is always ahead (factor)",
    )
    step_overhead: float = _assumed(
        0.0, "time of a step outside all of that: data, logging, first launches (seconds)"
    )
    gradient_bytes: float = _assumed(4, "size of a parameter's gradient in its reduction (bytes)")
    parameter_bytes: float = _assumed(2, "size of a parameter in its gather (bytes)")
    weight_traffic: float = _assumed(
        0, "memory traffic of a micro-batch's backward for each weight, however few its tokens (bytes)"
    )
    logit_traffic: float = _assumed(
        16, "memory traffic of the loss's forward for each logit; backward takes a third to a half (bytes)"
    )
    optimizer_bytes: float = _assumed(
        40, "memory traffic of the optimizer for each parameter that a GPU owns (bytes)"
    )

    def __post_init__(self) -> None:
        rates = ("matmul_rate", "memory_rate", "nvlink_rate", "network_rate", "node")
        for name in rates:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("tp_exposed", "dp_exposed"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share from 0 to 1, got {getattr(self, name)}")
        if not self.host_launch >= 0:
            raise ValueError(f"host_launch must not be negative, got {self.host_launch}")

    @staticmethod
    def of_gpu(name: str) -> Assumptions:
        """Rates of a GPU by its driver's name: fitted to an H200's measured times, else those assumed for an H100."""
        return Assumptions(**H200) if "H200" in name else Assumptions()

    def with_links(self, costs: Costs | None) -> Assumptions:
        """The same with NVLink's rate and latency from a profile's all-gather, if it has one."""
        link = ((costs and costs.links) or {}).get("all_gather")
        if link is None:
            return self
        return replace(self, nvlink_rate=1e9 / link.per_byte, nvlink_latency=link.latency / 1e9)

    def ring_rate(self, size: int, stride: int) -> float:
        """Bytes/s through each GPU of a ring of `size` ranks that lie `stride` GPUs apart.

        Ranks of one node share its way out, each bringing its own network card: 16 ranks side by side in nodes
        of 8 have 8 cards a node.
        """
        on_node = self._on_node(size, stride)
        return self.nvlink_rate if on_node >= size else min(self.nvlink_rate, on_node * self.network_rate)

    def pair_rate(self, size: int, stride: int) -> float:
        """Bytes/s into each GPU when all of a group send to each other: the share from other nodes is what counts."""
        on_node = self._on_node(size, stride)
        if on_node >= size:
            return self.nvlink_rate
        return min(self.nvlink_rate, self.network_rate * (size - 1) / (size - on_node))

    def latency(self, size: int, stride: int) -> float:
        return self.nvlink_latency if self._on_node(size, stride) >= size else self.network_latency

    def ring_ns(self, sent: float, size: int, stride: int) -> float:
        """Nanoseconds of an all-gather or reduce-scatter of `sent` bytes in all: each GPU passes (size - 1) / size."""
        if size == 1:
            return 0.0
        seconds = sent * (size - 1) / size / self.ring_rate(size, stride) + self.latency(size, stride)
        return seconds * 1e9

    def slower_row(self, table: KernelTable, size: int, stride: int, ways: int = 2) -> float:
        """Nanoseconds by which a key's K and V of 2 bytes, and their gradients if `ways` is 2, travel slower between
        such ranks than over NVLink."""
        row = 2 * 2 * ways * table.kv_heads * table.head_dim
        return 1e9 * row * (1 / self.pair_rate(size, stride) - 1 / self.nvlink_rate)

    def linked(self, table: KernelTable, size: int, stride: int, ways: int = 2) -> KernelTable:
        """The table with its exchange slowed from NVLink's rate to that between such ranks."""
        late = self.latency(size, stride) - self.nvlink_latency
        return replace(
            table,
            exchange=table.exchange + ways * 1e9 * late,
            exchange_row=table.exchange_row + self.slower_row(table, size, stride, ways),
        )

    def _on_node(self, size: int, stride: int) -> int:
        return max(1, min(size, self.node // stride))


H200: dict[str, Any] = {
    "matmul_rate": 680e12,
    "memory_rate": 3.3e12,
    "weight_traffic": 13.0,
    "logit_traffic": 40.0,
    "nvlink_rate": 245e9,
}
"""Fitted to layers of 2048 to 8192 on one H200, of one to eight tensor-parallel ranks (docs/results/1x_h200/
layer_rates.jsonl): 2K to 32K tokens within 10 %, in mean 3 %. Matrix products run at 580 to 785 TFLOP/s. NVLink's rate
is that of an all-gather or reduce-scatter of two GPUs (docs/results/2x_h200/profile_2048.json, in its samples)."""
