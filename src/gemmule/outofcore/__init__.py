"""Products of host operands on a GPU, in panels: also of what its memory does not hold."""
