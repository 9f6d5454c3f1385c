"""Benchmarks: README.md lists them. Started from the repository's root as `python -m scripts.bench.<folder>.<name>`."""
