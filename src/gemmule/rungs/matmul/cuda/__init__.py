"""CUDA rungs: a Python file and, with the same stem, the kernel."""
