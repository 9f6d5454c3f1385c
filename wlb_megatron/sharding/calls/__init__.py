"""Kernel calls and exchanges that serve a cut."""
