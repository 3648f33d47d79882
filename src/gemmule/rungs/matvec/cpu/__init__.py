"""Matrix-vector products that read along the reduction, on the CPU."""
