"""What the CUDA rungs share: the argument contract, primitives, Python halves of headers."""
