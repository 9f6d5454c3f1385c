"""Fixed windows, as they arrive or balanced over several batches."""
