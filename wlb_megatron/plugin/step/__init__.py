"""One training step over planned micro-batches."""
