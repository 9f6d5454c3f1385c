"""Decides which context-parallel rank holds which tokens of a micro-batch."""
