"""Put this folder on PYTHONPATH and Megatron's training loop runs on a machine without a GPU (gloo).

For the CPU example and the tests only. A sitecustomize, because checkpoint writers start fresh interpreters.
"""

import cpu_cuda  # noqa: F401
