"""Packs fixed windows, in arrival order or balanced over several batches."""
