"""The back end for NVIDIA GPUs: kernels compiled at run time, launched with one packed struct."""
