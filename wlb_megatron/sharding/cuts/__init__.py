"""The algorithms that cut a micro-batch over context-parallel ranks."""
