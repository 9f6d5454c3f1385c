"""Losses of runs that differ in the order of documents."""
