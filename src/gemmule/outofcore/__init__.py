"""Products of host operands on a GPU, in panels, so that they may exceed its memory."""
