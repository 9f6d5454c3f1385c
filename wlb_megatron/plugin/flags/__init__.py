"""Megatron's arguments as the plugin reads them, and what they refuse."""
