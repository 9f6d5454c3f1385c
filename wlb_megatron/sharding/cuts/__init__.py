"""The ways to cut a micro-batch over context-parallel ranks."""
