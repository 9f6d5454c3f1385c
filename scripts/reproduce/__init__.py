"""The WLB-LLM paper's tables, simulated: `python -m scripts.reproduce --out DIR`."""
