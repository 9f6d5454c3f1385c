"""Lets Megatron's training loop run on a machine without a GPU. This folder goes on PYTHONPATH: docs/cpu.md.

No module imports this package: an interpreter that finds this folder on PYTHONPATH imports `sitecustomize` by itself.
"""
