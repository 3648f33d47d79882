"""What PyTorch and JAX have to know of: products as operators, with derivatives and batches."""
