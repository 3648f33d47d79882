"""CPU rungs of grouped products."""
