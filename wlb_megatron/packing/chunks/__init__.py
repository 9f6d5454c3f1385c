"""Packs long documents in chunks."""
