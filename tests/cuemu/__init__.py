"""Runs unmodified CUDA C++ kernels on the CPU, one fiber per CUDA thread, to test them without a GPU."""
