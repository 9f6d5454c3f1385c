"""From the corpus to planned micro-batches, and their state in checkpoints."""
