"""Quantised matrices: codes, scales, zero points, and how they lie."""
