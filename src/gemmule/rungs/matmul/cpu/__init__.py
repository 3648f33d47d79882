"""Matrix-matrix products on the CPU."""
