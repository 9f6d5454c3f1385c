"""Conversations for supervised fine-tuning: what a line of a jsonl may hold, and the files they are tokenized into."""
