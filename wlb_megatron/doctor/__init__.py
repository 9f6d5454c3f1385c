"""`wlb-megatron doctor`: what is installed here, what the plugin will use of it, and what to fix."""
