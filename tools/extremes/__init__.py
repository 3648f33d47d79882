"""What only a GPU can show of a rung: the same bits in 100 runs, and more than 2^31 elements."""
