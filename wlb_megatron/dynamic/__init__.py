"""Heterogeneous context parallelism: in each micro-step, groups of different size over the ranks of a stage."""
