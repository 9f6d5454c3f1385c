"""Micro-batches planned ahead, loaded, and drawn by steps."""
