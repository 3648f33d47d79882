"""Proofs of CUDA rungs on a real GPU: what they run, what they are keyed by, how they stand."""
