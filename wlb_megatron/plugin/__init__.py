"""Where the package is hooked into Megatron-LM."""
