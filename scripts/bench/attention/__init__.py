"""One layer's attention on GPUs: errors, time and memory."""
