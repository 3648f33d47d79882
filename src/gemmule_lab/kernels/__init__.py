"""The lab's own CUDA kernels."""
