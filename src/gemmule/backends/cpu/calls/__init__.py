"""How products are called: as builtin functions, BLAS by its address, and with scalars."""
