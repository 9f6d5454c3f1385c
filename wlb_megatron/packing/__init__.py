"""Which documents train together: stream, queues, packers, order."""
