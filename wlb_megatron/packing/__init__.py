"""Decides which documents train together: stream, queues, packers, order."""
