"""Measures a model's costs on a GPU: `wlb-megatron profile`."""
