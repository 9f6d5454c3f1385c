"""Long documents in chunks."""
