"""FlashAttention-4's kernels beside cuDNN's."""
