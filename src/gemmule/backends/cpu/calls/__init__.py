"""Products that Python calls as builtin functions."""
