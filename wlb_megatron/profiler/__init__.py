"""Measures kernels and collectives for the cost model."""
