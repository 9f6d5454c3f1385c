"""Packing and planning: balance, delay, and the processor's time."""
