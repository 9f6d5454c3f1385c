"""Variable-length packing with delayed outliers."""
