"""Matrix-vector products that read across the reduction, on the CPU."""
