"""Quantising, dequantising and layouts on CUDA devices: Python, and kernels of the same stem."""
