"""Predictions without a GPU, and steps measured against them."""
