"""Predicts from document lengths, without a GPU, what a packing would bring."""
