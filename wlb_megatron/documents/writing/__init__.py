"""Corpora made of files of text."""
