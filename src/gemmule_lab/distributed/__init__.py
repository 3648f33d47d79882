"""Products over several processes, measured under torchrun."""
