"""Computes attention under a shard plan: executor, key/value exchange, backends, rotary positions."""
