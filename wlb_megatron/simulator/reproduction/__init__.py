"""The paper's tables, simulated."""
