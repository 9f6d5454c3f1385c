"""What changes in the model that Megatron builds."""
