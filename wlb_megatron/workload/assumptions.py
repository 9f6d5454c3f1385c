"""Every rate and network figure the simulator assumes, in one place. What is measured is in the kernel table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Figures of an H100 cluster; none of them was measured. Rates in units per second, latencies in seconds.

    matmul_rate: FLOP/s of bf16 matrix products. memory_rate: bytes/s of element-wise kernels.
    nvlink_rate: bytes/s of a GPU to others of its node. network_rate: bytes/s of a GPU to other nodes.
    node: GPUs of a node. nvlink_latency, network_latency: of a collective or a transfer.
    activation_passes: times that a layer's forward element-wise kernels read or write a hidden-wide row (norms,
        residuals, rotary); ffn_passes: the same of ffn-wide rows (activation function). Backward: twice.
    tp_exposed: share of tensor parallelism's all-gathers and reduce-scatters that is not hidden by matrix products.
    dp_exposed: share of the gradient reduction and parameter gather that could be hidden by the last micro-batch's
        backward and the first one's forward but is not; 1: not overlapped at all.
    host_launch: share of the host's launches, as measured (of a profile, else on an H200's host), that a micro-batch
        takes at least; 0: the host is always ahead.
    step_overhead: of an iteration, outside all of that: data, logging, the first launches.
    gradient_bytes, parameter_bytes: of a parameter, as reduced and as gathered. optimizer_bytes: that the optimizer
        reads and writes for a parameter that a GPU owns.
    """

    matmul_rate: float = 650e12
    memory_rate: float = 2.5e12
    nvlink_rate: float = 370e9
    network_rate: float = 45e9
    node: int = 8
    nvlink_latency: float = 10e-6
    network_latency: float = 25e-6
    activation_passes: float = 12
    ffn_passes: float = 3
    tp_exposed: float = 0.3
    dp_exposed: float = 0.0
    host_launch: float = 1.0
    step_overhead: float = 0.0
    gradient_bytes: float = 4
    parameter_bytes: float = 2
    optimizer_bytes: float = 40

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

    def _on_node(self, size: int, stride: int) -> int:
        return max(1, min(size, self.node // stride))
