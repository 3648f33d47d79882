"""Quantised products of blocks of 64 bytes in vector registers, of AVX-512 or AVX2."""
