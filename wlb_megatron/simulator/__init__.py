"""Predicts the time of an iteration of 4D training."""
