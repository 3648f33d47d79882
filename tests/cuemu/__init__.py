"""Runs unmodified CUDA C++ kernels on the CPU, one fiber per thread, to test without a GPU."""
