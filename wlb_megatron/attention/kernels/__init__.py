"""Attention kernels: the backends, the choice among them, and what they need before a step."""
