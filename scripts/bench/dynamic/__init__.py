"""Dynamic groups: plans, and what they gain."""
