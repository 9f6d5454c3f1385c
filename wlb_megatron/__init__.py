"""Workload-balanced packing and context parallelism for Megatron-LM."""

__version__ = "0.1.0"
