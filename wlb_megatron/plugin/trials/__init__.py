"""Whether versions that were not tried compute what they should."""
