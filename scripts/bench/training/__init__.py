"""Whole training steps through Megatron's loop on GPUs."""
