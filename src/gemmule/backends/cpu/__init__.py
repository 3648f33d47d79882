"""Host arrays, kernels compiled where they run, and BLAS."""
