"""CUDA rungs of grouped products."""
