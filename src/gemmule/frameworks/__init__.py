"""Products as operators of PyTorch and JAX, with derivatives and batches."""
