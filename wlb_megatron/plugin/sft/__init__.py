"""Fine-tuning data: conversations through Megatron's own tokenizer into a .bin, an .idx and a mask."""
