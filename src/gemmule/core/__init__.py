"""Frozen data and pure functions: problems, operands, rungs, choices; no library is touched."""
