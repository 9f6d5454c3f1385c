"""The kernel calls and key exchanges that compute attention under a shard plan."""
