"""How one micro-batch's tokens are laid over context-parallel ranks."""
