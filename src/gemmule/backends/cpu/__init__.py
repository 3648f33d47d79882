"""Host arrays, Numba kernels and BLAS."""
