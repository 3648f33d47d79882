"""What quantises and puts in order on CUDA devices; a Python half, and kernels of the same stem."""
